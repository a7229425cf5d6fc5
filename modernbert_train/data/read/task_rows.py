"""Read the rows of a task with the common readers; any faulty row is an error that names its line.

Tables are .jsonl, an object a line; .tsv without quotes and .csv, each with a header line; .parquet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from modernbert_train.config.tools.prepare import RowSourceConfig
from modernbert_train.core.files import TABLE_ENDS, ending
from modernbert_train.core.read_json import MAX_BYTES, parse_json
from modernbert_train.core.text import shown_value
from modernbert_train.data.read.find_files import TABLES
from modernbert_train.data.read.jsonl import has_half_pair
from modernbert_train.data.read.rows import HALF_PAIR, Columns, Row, Span, sound_rows
from modernbert_train.data.read.sources import read_rows
from modernbert_train.data.read.unpacked import DAMAGED, damage, open_unpacked

_MAX_TEXT = 1 << 22  # maximum characters of a text; an encoder reads only its first thousands
ENDS = TABLE_ENDS


class Cell(str):
    """A value of a .csv or .tsv, where all values are texts."""


class TaskRow(NamedTuple):
    """A row of a task.

    Attributes:
        line: its number in the file.
        texts: the values of the columns that hold text.
        values: of the other columns; in a .tsv or .csv each is a Cell.
    """

    line: int
    texts: tuple[str, ...]
    values: tuple[Any, ...]


def rows_of(path: Path, kind: str, columns: Sequence[str], keys: str = "") -> Iterator[Row]:
    """Yield the rows of a file, plain or compressed.

    Args:
        path: the file.
        kind: of the file, as in a source of `prepare`; or `lines`.
        columns: that every row must have.
        keys: configuration keys that name them, for messages; empty: the format fixes their names.

    Raises:
        ValueError: a row is not sound, or the file cannot be read; names the line, the fault and the remedy.
    """
    source = RowSourceConfig(kind=kind, path=str(path))
    requested = Columns(columns, unique=True, strict=True)
    return sound_rows(read_rows(Span("", str(path)), source, requested, _MAX_TEXT), keys)


def table_rows(
    path: Path,
    text_columns: Sequence[str],
    others: Sequence[str] = (),
    keys: str = "text_columns and label_column",
) -> Iterator[TaskRow]:
    """Yield the rows of a table; the end of the file's name gives its format.

    Args:
        path: ends in one of ENDS.
        text_columns: must hold texts.
        others: further columns.
        keys: see `rows_of`.

    Raises:
        ValueError: see `rows_of`.
    """
    kind = TABLES[ending(path)]
    rows = rows_of(path, kind, (*text_columns, *others), keys)
    return task_rows(rows, text_columns, others, Cell if kind in ("csv", "tsv") else None)


def task_rows(
    rows: Iterable[Row],
    text_columns: Sequence[str],
    others: Sequence[str],
    cell: Callable[[str], Any] | None = None,
    word: str = "line",
) -> Iterator[TaskRow]:
    """Yield rows by their columns, each text checked. Raises ValueError with the place."""
    for row in rows:
        texts = tuple(row.value(column) for column in text_columns)
        for column, text in zip(text_columns, texts, strict=True):
            require_text(text, f"{word} {row.line}: {column}")
        values = map(row.value, others)
        yield TaskRow(row.line, texts, tuple(map(cell, values) if cell else values))


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text without their ends, numbered. Raises ValueError; see `rows_of`."""
    return ((row.line, row.fields["text"]) for row in rows_of(path, "lines", ()))


def objects(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the objects of a .jsonl with these keys, numbered. Raises ValueError; see `rows_of`."""
    return ((row.line, row.fields) for row in rows_of(path, "jsonl", columns))


def json_of(path: Path) -> Any:
    """Read a .json file. Raises OSError; ValueError if it is damaged, too large, or no JSON."""
    with open_unpacked(path) as content:
        try:
            raw = content.read(MAX_BYTES + 1)
        except DAMAGED as error:
            raise ValueError(damage(error)) from None
    if len(raw) > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES:,} bytes. Write .jsonl, which has no limit.")
    parsed = parse_json(raw)
    if has_half_pair(raw.decode("utf-8", "replace"), parsed):
        raise ValueError(f"{HALF_PAIR}. Correct it, or remove it.")
    return parsed


def require_text(value: Any, where: str) -> None:
    """Raise ValueError unless a value is a string of at most `_MAX_TEXT` characters."""
    if not isinstance(value, str):
        raise ValueError(f"{where} is {shown_value(value)}, and not a text. Correct it.")
    if len(value) > _MAX_TEXT:
        raise ValueError(
            f"{where} has {len(value):,} characters, and a text may have at most {_MAX_TEXT:,}. Divide it, or keep its "
            "beginning: an encoder reads no more."
        )
