"""CSV, and TSV without quotes, cell by cell as text: 007 stays 007, and NA stays a word.

Read with the standard library: pandas silently shifts the cells of a row with more cells than the header, and drops the
rest. A file cannot be cut, because a cell may hold newlines.
"""

from __future__ import annotations

import csv
import io
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from data_prep.read.encodings import (
    AUTO,
    UTF_8,
    beginning,
    codec_of,
    guess,
    has_utf_16_mark,
    is_surely_utf_8,
)
from data_prep.read.items import Columns, LeftOut, Row, Span, decoded_as, no_column, no_lines, value_of
from modernbert_train.config.tools.prepare import RowSourceConfig
from modernbert_train.data.unpacked import open_unpacked

_CELL_CHARACTERS = 1 << 28  # else an unclosed quote would read the rest of a file into memory
_DELIMITERS = (";", "\t", "|")
_NAMES = {"\t": "\\t"}


def read_csv(span: Span, source: RowSourceConfig, columns: Columns, max_characters: int) -> Iterator[Row | LeftOut]:
    """Yield the rows of a CSV or TSV file, plain or compressed; `auto` looks at its first 64 MB."""
    csv.field_size_limit(_CELL_CHARACTERS)
    quotes, altered = source.kind != "tsv", None
    delimiter = source.delimiter or ("," if quotes else "\t")
    codec, errors = "utf-8-sig", "surrogateescape"  # a damaged byte loses only its row
    if source.encoding != UTF_8 and (found := _codec(span.file, source.encoding)) != UTF_8:
        altered, codec, errors = decoded_as(found), found, "strict"
    with open_unpacked(span.file) as content:
        rows = _rows(_Lines(io.TextIOWrapper(content, codec, errors, newline="")), delimiter, quotes)
        head, number = next(rows, None), 0
        if head is not None and (problem := columns.lacking(head)) is not None:
            yield no_column(f"{span.path}: all rows", problem + _hint(head, delimiter))
            return
        for number, cells in enumerate(rows, start=1):
            yield _row(f"{span.path}:{number}", cells, head or [], columns, altered)
        if not number:
            yield no_lines(span.file)


class _Lines:
    """Lines of a file; keeps the lines of the current row."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines = lines
        self.row: list[str] = []

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.row.append(line)
        return line


def _rows(lines: _Lines, delimiter: str, quotes: bool) -> Iterator[list[str]]:
    """Yield the rows that are not blank. Raises csv.Error if the file ends within a quoted cell."""
    last: tuple[list[str], list[str]] | None = None
    quoting = csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE
    for cells in csv.reader(lines, delimiter=delimiter, quoting=quoting):
        if last is not None:
            yield last[0]
        last = (cells, lines.row) if len(cells) > 1 or "".join(lines.row).strip() else None
        lines.row = []
    if last is not None:
        if quotes:
            _require_closed(last[1], delimiter)
        yield last[0]


def _require_closed(row: list[str], delimiter: str) -> None:
    try:
        deque(csv.reader(row, delimiter=delimiter, strict=True), maxlen=0)
    except csv.Error as error:
        if "unexpected end" in str(error):  # ignore other complaints of strict, as pandas does
            raise


def _row(id: str, cells: list[str], head: list[str], columns: Columns, altered: str | None) -> Row | LeftOut:
    if len(cells) > len(head):
        detail = f"{len(cells)} cells in a row, the header names {len(head)}; quote cells that hold the delimiter"
        return LeftOut(id, "not_csv", detail)
    row = dict(zip(reversed(head[: len(cells)]), reversed(cells), strict=True))  # the first of equal names
    for text in (value_of(row, column) for column in columns.required):
        if (
            text
            and not text.isascii()
            and (bad := next(((i, c) for i, c in enumerate(text) if "\udc80" <= c <= "\udcff"), None))
        ):
            return LeftOut(id, "not_utf8", f"not UTF-8: byte 0x{ord(bad[1]) - 0xDC00:02x} at character {bad[0]} of it")
    return Row(id, row, altered)


def _hint(head: list[str], delimiter: str) -> str:
    """Suggest the delimiter that the header seems to have."""
    found = [each for each in (*_DELIMITERS, ",") if each != delimiter and any(each in name for name in head)]
    if len(head) > 1 or not found:
        return ""
    name = _NAMES.get(found[0], found[0])
    return f'; its delimiter seems to be "{name}": set delimiter: "{name}"'


def _codec(file: Path, encoding: str) -> str:
    """Return Python's name of a file's encoding, which also removes a byte order mark; UTF-8 without a guess."""
    with open_unpacked(file) as content:
        begin = beginning(content)
    found = (guess(begin) or UTF_8) if encoding == AUTO else codec_of(encoding, begin)
    if encoding != AUTO and is_surely_utf_8(begin):
        return UTF_8
    return "utf-16" if found.startswith("utf-16") and has_utf_16_mark(begin) else found
