"""Rows of Parquet files, by pyarrow, in bounded memory. A file can be cut between its row groups.

A dictionary lets a file of kilobytes name one long text a million times. Such columns stay dictionaries, one row at a
time becomes text, and the sum of the texts has the bound of compressed files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from modernbert_train.config.tools.prepare import RowSourceConfig
from modernbert_train.core.read_json import open_file
from modernbert_train.data.read.rows import Columns, LeftOut, Row, Span, no_column, no_lines
from modernbert_train.data.read.unpacked import unpacked_limit, unpacks_to_too_much

_ROWS = 64  # turned into Python objects at once
_BUFFER_BYTES = 1 << 20
_LONG, _DENSE = 1 << 22, 50  # bytes of a column's chunk, and times its compressed size, from which a text may be long


def parquet_groups(file: Path) -> list[int]:
    """Return the bytes of each row group, decompressed; empty for a damaged file, which reading will report."""
    import pyarrow.parquet

    with suppress(OSError, ValueError):  # pyarrow's own errors are both
        metadata = pyarrow.parquet.read_metadata(file)
        return [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
    return []


def parquet_columns(file: Path) -> list[str]:
    """Return the names of a file's columns; raises OSError or ValueError if it is damaged."""
    import pyarrow.parquet

    return list(pyarrow.parquet.read_schema(file).names)


def read_parquet(span: Span, source: RowSourceConfig, columns: Columns, max_characters: int) -> Iterator[Row | LeftOut]:
    """Yield the rows of the row groups of a span."""
    wanted = (*columns.required, *columns.optional)
    with open_parquet(span.file, wanted) as table:
        names = table.schema_arrow.names
        if (problem := columns.lacking(names)) is not None:
            yield no_column(f"{span.path}: all rows", problem)
            return
        if not table.metadata.num_rows:
            yield no_lines(span.file)
        there = [c for c in wanted if {c, c.split(".")[0]} & set(names)]
        for number, row in parquet_rows(span.file, table, there, span.begin, span.end):
            yield Row(f"{span.path}:{number}", row, line=number)


@contextmanager
def open_parquet(path: Path, columns: Sequence[str] = ()) -> Iterator[Any]:
    """Open a Parquet file; of `columns`, those that are suspiciously dense stay dictionaries.

    Raises:
        OSError: it cannot be read, or is a pipe or a device.
        pyarrow.ArrowException: it is damaged.
    """
    import pyarrow.parquet

    open_file(path).close()
    with pyarrow.parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as table:
        dense = _dense(table.metadata, columns)
        if not dense:
            yield table
            return
    with pyarrow.parquet.ParquetFile(path, read_dictionary=dense, buffer_size=_BUFFER_BYTES, pre_buffer=False) as table:
        yield table


def parquet_rows(
    path: Path, table: Any, columns: Sequence[str], begin: int = 0, end: int | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of each row in the file, from 1, and its columns.

    Args:
        path: of the table.
        table: from `open_parquet`, with the same columns.
        columns: that are read.
        begin, end: row groups.

    Raises:
        ValueError: the texts are more than `unpacked_limit`.
    """
    limit, size = unpacked_limit(path.stat().st_size), 0
    number = sum(table.metadata.row_group(i).num_rows for i in range(begin))
    groups = list(range(begin, table.num_row_groups if end is None else end))
    rows = 1 if _dense(table.metadata, columns) else _ROWS
    for batch in table.iter_batches(rows, row_groups=groups, columns=list(columns), use_threads=False):
        for row in batch.to_pylist():
            number += 1
            size += sum(len(value) for value in row.values() if isinstance(value, str))
            if size > limit:
                raise unpacks_to_too_much(limit)
            yield number, row


def _dense(metadata: Any, columns: Sequence[str]) -> list[str]:
    found: set[str] = set()
    tops = {column.split(".")[0] for column in columns}
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for chunk in map(group.column, range(group.num_columns)):
            long = chunk.total_uncompressed_size > max(_LONG, _DENSE * chunk.total_compressed_size)
            if long and chunk.path_in_schema.split(".")[0] in tops and chunk.physical_type == "BYTE_ARRAY":
                found.add(chunk.path_in_schema)
    return sorted(found)
