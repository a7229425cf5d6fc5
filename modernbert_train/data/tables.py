"""Tables of texts: .jsonl, an object a line; .tsv without quotes and .csv, names of columns first; .parquet."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from modernbert_train.core.files import os_errors_as
from modernbert_train.core.read_json import parse_json
from modernbert_train.core.text import first_line, plural, shorten

_AT_ONCE = 1024  # rows
_LONGEST = 1 << 26  # characters of a line
_SHOWN = 10  # columns and classes named in a message
ENDS = (".jsonl", ".tsv", ".csv", ".parquet")


class Row(NamedTuple):
    """A line of a table.

    Attributes:
        line: its number in the file.
        texts: the values of the columns that hold text.
        values: those of the others that were asked for; of a .tsv or .csv they are texts too.
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
    """The lines of a table, by the end of its name.

    Args:
        path: ends in one of ENDS.
        text_columns: must hold texts.
        others: further columns.
        keys: of the configuration that name the columns, for messages.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged or lacks a column; names the line.
    """
    read = {".jsonl": _jsonl, ".parquet": _parquet}.get(path.suffix, _table)
    try:
        yield from read(path, text_columns, others, keys)
    except csv.Error as error:
        raise ValueError(str(error)) from None


def objects(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a .jsonl, one a line, with the number of the line; empty lines do not count.

    Args:
        path: of the file.
        columns: what an object has, for messages.

    Raises:
        OSError: it cannot be read.
        ValueError: a line is no object; names it.
    """
    for number, line in enumerate(lines_of(path), start=1):
        if not line.strip():
            continue
        with os_errors_as(ValueError, f"line {number} is not JSON", "Correct it, or remove it.", ValueError):
            entry = parse_json(line)
        if has_half_surrogate(line, entry):
            raise ValueError(
                f"line {number} holds half of a surrogate pair, which is no text. Correct it, or remove it."
            )
        if not isinstance(entry, dict):
            raise ValueError(f"line {number} is no object. Write one a line, such as {{{_shown(columns)}}}.")
        yield number, entry


def has_half_surrogate(line: str, value: Any) -> bool:
    """Return True if JSON holds text that UTF-8 cannot, as exports of UTF-16 programs do; only escapes can spell it."""
    if "\\u" not in line:
        return False
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _jsonl(path: Path, text_columns: Sequence[str], others: Sequence[str], keys: str) -> Iterator[Row]:
    columns = (*text_columns, *others)
    for number, entry in objects(path, columns):
        _require_columns(columns, list(entry), f"line {number}", keys)
        yield _row(number, entry, text_columns, others)


def _row(number: int, entry: dict[str, Any], text_columns: Sequence[str], others: Sequence[str]) -> Row:
    for column in text_columns:
        if not isinstance(entry[column], str):
            raise ValueError(f"line {number}: {column} is {shown_value(entry[column])}, and not a text. Correct it.")
    return Row(number, tuple(entry[c] for c in text_columns), tuple(entry[c] for c in others))


def _parquet(path: Path, text_columns: Sequence[str], others: Sequence[str], keys: str) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    columns, number = [*text_columns, *others], 0
    try:
        with parquet.ParquetFile(path) as file:
            _require_columns(columns, file.schema_arrow.names, "the file", keys)
            for batch in file.iter_batches(_AT_ONCE, columns=columns):
                for entry in batch.to_pylist():
                    number += 1
                    yield _row(number, entry, text_columns, others)
    except pyarrow.ArrowException as error:
        raise ValueError(f"no whole Parquet file ({first_line(error)}). Restore it.") from None


def _table(path: Path, text_columns: Sequence[str], others: Sequence[str], keys: str) -> Iterator[Row]:
    lines, columns = lines_of(path), (*text_columns, *others)
    if path.suffix == ".tsv":
        rows = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        rows = csv.reader(lines, strict=True)
    head = next(rows, [])
    _require_columns(columns, head, "the first line", keys)
    places = [head.index(column) for column in columns]
    for row in rows:
        if not row:
            continue
        if len(row) != len(head):
            raise ValueError(
                f"line {rows.line_num} has {plural(len(row), 'value')}, and the first line names {len(head)}. "
                f"Correct it; a .csv quotes texts that hold a comma or a line break, a .tsv holds no tabs in texts."
            )
        values = tuple(row[place] for place in places)
        yield Row(rows.line_num, values[: len(text_columns)], values[len(text_columns) :])


def lines_of(path: Path) -> Iterator[str]:
    """The lines of a text, with their ends. Raises OSError, and ValueError of what is not UTF-8 or has no lines."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST), ""), start=1):
                if len(line) == _LONGEST:
                    raise ValueError(f"line {number} has {_LONGEST:,} characters or more. Divide it.")
                yield line
        except UnicodeDecodeError:
            raise ValueError("is not UTF-8. Convert it.") from None


def _require_columns(columns: Sequence[str], there: Sequence[str], where: str, keys: str) -> None:
    if missing := [column for column in columns if column not in there]:
        raise ValueError(
            f"{where} has no {' and no '.join(missing)}; it has {some(there) or 'nothing'}. Set {keys} to names of "
            "them."
        )


def shown_value(value: Any) -> str:
    """A value for a message."""
    return shorten(repr(value), 40) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def some(names: Sequence[str]) -> str:
    """The first of many names, for a message."""
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(shorten(str(name), 40) for name in names[:_SHOWN]) + more


def _shown(columns: Sequence[str]) -> str:
    return ", ".join(f'"{column}": "..."' for column in columns)
