"""Tables of texts: .jsonl, an object a line; .tsv without quotes and .csv, names of columns first; .parquet.

All but .parquet may be compressed. Rows that do not fit a task are refused with their line.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from modernbert_train.core.files import TABLE_ENDS, ending, os_errors_as
from modernbert_train.core.read_json import MAX_BYTES, parse_json
from modernbert_train.core.text import first_line, plural, shorten
from modernbert_train.data.parquet import open_parquet, parquet_rows
from modernbert_train.data.unpacked import DAMAGED, damage, open_unpacked

_LONGEST = 1 << 26  # characters of a line
_MAX_TEXT = 1 << 22  # maximum characters of a text; an encoder reads only its first thousands
_SHOWN = 10  # columns and classes named in a message
ENDS = TABLE_ENDS


class Cell(str):
    """A value of a .csv or .tsv, where all values are texts."""


class Row(NamedTuple):
    """A line of a table.

    Attributes:
        line: its number in the file.
        texts: the values of the columns that hold text.
        values: of the other columns; in a .tsv or .csv each is a Cell.
    """

    line: int
    texts: tuple[str, ...]
    values: tuple[Any, ...]


def read_rows(
    path: Path,
    text_columns: Sequence[str],
    others: Sequence[str] = (),
    keys: str = "text_columns and label_column",
) -> Iterator[Row]:
    """Yield the lines of a table; the end of the file's name gives its format.

    Args:
        path: ends in one of ENDS.
        text_columns: must hold texts.
        others: further columns.
        keys: configuration keys that name the columns, for messages.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged or lacks a column; names the line.
    """
    read = {".jsonl": _jsonl, ".parquet": _parquet}.get(ending(path), _table)
    for row in read(path, text_columns, others, keys):
        for column, text in zip(text_columns, row.texts, strict=True):
            require_text(text, f"line {row.line}: {column}")
        yield row


def objects(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a .jsonl, one a line, with their line numbers; empty lines are skipped.

    Args:
        path: the file.
        columns: keys of an object, for messages; duplicates are an error.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not an object; names it.
    """
    for number, line in enumerate(lines_of(path), start=1):
        if not line.strip():
            continue
        with os_errors_as(ValueError, f"line {number} is not JSON", "Correct it, or remove it.", ValueError):
            entry = parse_json(line, twice=columns)
        _require_whole(line, entry, f"line {number} ")
        if not isinstance(entry, dict):
            raise ValueError(f"line {number} is no object. Write one a line, such as {{{_shown(columns)}}}.")
        yield number, entry


def json_of(path: Path) -> Any:
    """Read a .json file. Raises OSError; ValueError if it is damaged, too large, or no JSON."""
    with open_unpacked(path) as content:
        try:
            raw = content.read(MAX_BYTES + 1)
        except DAMAGED as error:
            raise ValueError(damage(error)) from None
    if len(raw) > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES:,} bytes. Write .jsonl, which has no limit.")
    found = parse_json(raw)
    _require_whole(raw.decode("utf-8", "replace"), found, "")
    return found


def _require_whole(text: str, value: Any, where: str) -> None:
    """Reject text that UTF-8 cannot encode, as UTF-16 programs export it; it can only come from escapes."""
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"{where}holds half of a surrogate pair, which is no text. Correct it, or remove it."
            ) from None


def _jsonl(path: Path, text_columns: Sequence[str], others: Sequence[str], keys: str) -> Iterator[Row]:
    columns = (*text_columns, *others)
    for number, entry in objects(path, columns):
        _require_columns(columns, list(entry), f"line {number}", keys)
        yield _row(number, entry, text_columns, others)


def require_text(value: Any, where: str) -> None:
    """Raise ValueError unless a value is a text of bearable length."""
    if not isinstance(value, str):
        raise ValueError(f"{where} is {shown_value(value)}, and not a text. Correct it.")
    if len(value) > _MAX_TEXT:
        raise ValueError(
            f"{where} has {len(value):,} characters, and a text may have at most {_MAX_TEXT:,}. Divide it, or keep its "
            "beginning: an encoder reads no more."
        )


def _row(number: int, entry: dict[str, Any], text_columns: Sequence[str], others: Sequence[str]) -> Row:
    return Row(number, tuple(entry[c] for c in text_columns), tuple(entry[c] for c in others))


def _parquet(path: Path, text_columns: Sequence[str], others: Sequence[str], keys: str) -> Iterator[Row]:
    import pyarrow

    columns = [*text_columns, *others]
    try:
        with open_parquet(path, columns) as table:
            _require_columns(columns, table.schema_arrow.names, "the file", keys)
            for number, entry in parquet_rows(path, table, columns):
                yield _row(number, entry, text_columns, others)
    except pyarrow.ArrowException as error:
        raise ValueError(f"no whole Parquet file ({first_line(error)}). Restore it.") from None


def _table(path: Path, text_columns: Sequence[str], others: Sequence[str], keys: str) -> Iterator[Row]:
    lines, columns = lines_of(path), (*text_columns, *others)
    csv.field_size_limit(_LONGEST)
    if ending(path) == ".tsv":
        rows = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        rows = csv.reader(lines, strict=True)
    head = next(_read(rows), [])
    _require_columns(columns, head, "the first line", keys)
    places = [head.index(column) for column in columns]
    for row in _read(rows):
        if not row:
            continue
        if len(row) != len(head):
            raise ValueError(
                f"line {rows.line_num} has {plural(len(row), 'value')}, and the first line names {len(head)}. "
                f"Correct it; a .csv quotes texts that hold a comma or a line break, a .tsv holds no tabs in texts."
            )
        values = [row[place] for place in places]
        yield Row(rows.line_num, tuple(values[: len(text_columns)]), tuple(map(Cell, values[len(text_columns) :])))


def _read(rows: Any) -> Iterator[list[str]]:
    """Yield the rows of a csv.reader. Raises ValueError with the line."""
    try:
        yield from rows
    except csv.Error as error:
        raise ValueError(f"line {rows.line_num}: {error}. Correct it; quotes in a quoted text are doubled.") from None


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a text, with their ends. Raises OSError; ValueError if it is damaged or not UTF-8."""
    with open_unpacked(path) as content, io.TextIOWrapper(content, "utf-8-sig", newline="") as file:
        try:
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST), ""), start=1):
                if len(line) == _LONGEST:
                    raise ValueError(f"line {number} has {_LONGEST:,} characters or more. Divide it.")
                yield line
        except UnicodeDecodeError:
            raise ValueError("is not UTF-8. Convert it: iconv -f ENCODING -t UTF-8.") from None
        except DAMAGED as error:
            raise ValueError(damage(error)) from None


def _require_columns(columns: Sequence[str], there: Sequence[str], where: str, keys: str) -> None:
    if missing := [column for column in columns if column not in there]:
        raise ValueError(
            f"{where} has no {' and no '.join(missing)}; it has {some(there) or 'nothing'}. Set {keys} to names of "
            "them."
        )
    if twice := [column for column in columns if list(there).count(column) > 1]:
        raise ValueError(f"{where} has {some(twice)} twice, and which of them is meant? Rename one.")


def shown_value(value: Any) -> str:
    """Format a value for a message."""
    return shorten(repr(value), 40) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def some(names: Sequence[str]) -> str:
    """Format the first of many names for a message."""
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(shorten(str(name), 40) for name in names[:_SHOWN]) + more


def _shown(columns: Sequence[str]) -> str:
    return ", ".join(f'"{column}": "..."' for column in columns)
