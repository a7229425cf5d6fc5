"""Read CSV, and TSV without quotes, with every cell as text: 007 stays 007, and NA stays a word.

Read with the standard library: pandas silently shifts the cells of a row with more cells than the header, and drops the
rest. A file cannot be cut, because a cell may hold newlines.
"""

from __future__ import annotations

import csv
import io
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from modernbert_train.config.tools.prepare import RowSourceConfig
from modernbert_train.core.text import plural
from modernbert_train.data.read.encodings import (
    AUTO,
    UTF_8,
    beginning,
    codec_of,
    guess,
    has_utf_16_mark,
    is_surely_utf_8,
)
from modernbert_train.data.read.rows import Columns, LeftOut, Row, Span, decoded_as, no_column, no_lines, value_of
from modernbert_train.data.read.unpacked import open_unpacked

_CELL_CHARACTERS = 1 << 28  # else an unclosed quote would read the rest of a file into memory
_DELIMITERS = (";", "\t", "|")
_NAMES = {"\t": "\\t"}


def read_csv(span: Span, source: RowSourceConfig, columns: Columns, max_characters: int) -> Iterator[Row | LeftOut]:
    """Yield the rows of a CSV or TSV file, plain or compressed; `auto` looks at its first 64 MB."""
    csv.field_size_limit(_CELL_CHARACTERS)
    quotes, altered = source.kind != "tsv", None
    delimiter = source.delimiter or ("," if quotes else "\t")
    codec, errors = "utf-8-sig", "surrogateescape"  # a damaged byte loses only its row
    if source.encoding != UTF_8 and (detected := _codec(span.file, source.encoding)) != UTF_8:
        altered, codec, errors = decoded_as(detected), detected, "strict"
    with open_unpacked(span.file) as content, io.TextIOWrapper(content, codec, errors, newline="") as file:
        rows = _rows(file, delimiter, quotes, columns.strict)
        try:
            head, number = next((cells for _, cells in rows), []), 0
            if (head or columns.strict) and (problem := columns.lacking(head)) is not None:
                yield no_column(f"{span.path}: all rows", problem + _hint(head, delimiter), line=1)
                return
            for number, (line, cells) in enumerate(rows, start=1):
                yield _row(f"{span.path}:{number}", cells, head, columns, altered, line)
            if not number:
                yield no_lines(span.file)
        except _BrokenRow as error:
            yield LeftOut(f"{span.path}: the rest", "not_csv", str(error), rest=True, line=error.line)


class _BrokenRow(Exception):
    """A row that breaks the rules of CSV, in the line of this number."""

    def __init__(self, line: int, error: csv.Error) -> None:
        super().__init__(str(error))
        self.line = line


def _lines(file: io.TextIOWrapper, row: list[str]) -> Iterator[str]:
    """Yield the lines of a file; add each to the lines of the current row."""
    while line := file.readline(_CELL_CHARACTERS):
        if len(line) == _CELL_CHARACTERS:
            raise csv.Error(f"a line of {_CELL_CHARACTERS:,} characters or more")
        row.append(line)
        yield line


def _rows(file: io.TextIOWrapper, delimiter: str, quotes: bool, strict: bool) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows that are not blank, each with the number of its last line.

    Raises:
        csv.Error: the file ends within a quoted cell; or it is _BrokenRow, if rules are strict.
    """
    row: list[str] = []
    last: tuple[int, list[str], list[str]] | None = None
    quoting = csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE
    reader = csv.reader(_lines(file, row), delimiter=delimiter, quoting=quoting, strict=strict)
    try:
        for cells in reader:
            if last is not None:
                yield last[:2]
            blank = not cells if strict else len(cells) < 2 and not "".join(row).strip()
            last = None if blank else (reader.line_num, cells, [*row])
            row.clear()
        if last is not None and quotes:
            _require_closed(last[2], delimiter)
    except csv.Error as error:
        if strict:
            raise _BrokenRow(reader.line_num, error) from None
        raise
    if last is not None:
        yield last[:2]


def _require_closed(row: list[str], delimiter: str) -> None:
    try:
        deque(csv.reader(row, delimiter=delimiter, strict=True), maxlen=0)
    except csv.Error as error:
        if "unexpected end" in str(error):  # ignore other complaints of strict, as pandas does
            raise


def _row(id: str, cells: list[str], head: list[str], columns: Columns, altered: str | None, line: int) -> Row | LeftOut:
    if len(cells) > len(head) or (columns.strict and len(cells) < len(head)):
        detail = (
            f"{plural(len(cells), 'cell')} in a row, the header names {len(head)}; quote cells that hold the delimiter"
        )
        return LeftOut(id, "not_csv", detail, line=line)
    row = dict(zip(reversed(head[: len(cells)]), reversed(cells), strict=True))  # the first of equal names
    for text in (value_of(row, column) for column in columns.required):
        if (
            text
            and not text.isascii()
            and (bad := next(((i, c) for i, c in enumerate(text) if "\udc80" <= c <= "\udcff"), None))
        ):
            detail = f"not UTF-8: byte 0x{ord(bad[1]) - 0xDC00:02x} at character {bad[0]} of it"
            return LeftOut(id, "not_utf8", detail, line=line)
    return Row(id, row, altered, line)


def _hint(head: list[str], delimiter: str) -> str:
    """Suggest the delimiter that the header seems to have."""
    others = [each for each in (*_DELIMITERS, ",") if each != delimiter and any(each in name for name in head)]
    if len(head) > 1 or not others:
        return ""
    name = _NAMES.get(others[0], others[0])
    return f'; its delimiter seems to be "{name}": set delimiter: "{name}"'


def _codec(file: Path, encoding: str) -> str:
    """Return Python's name of a file's encoding, which also removes a byte order mark; UTF-8 without a guess."""
    with open_unpacked(file) as content:
        begin = beginning(content)
    codec = (guess(begin) or UTF_8) if encoding == AUTO else codec_of(encoding, begin)
    if encoding != AUTO and is_surely_utf_8(begin):
        return UTF_8
    return "utf-16" if codec.startswith("utf-16") and has_utf_16_mark(begin) else codec
