"""Rows of Parquet files, by pyarrow, in bounded memory.

A dictionary lets a file of kilobytes name one long text a million times. Such columns stay dictionaries, one row at a
time becomes text, and the sum of the texts has the bound of compressed files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from modernbert_train.core.read_json import open_file
from modernbert_train.data.unpacked import unpacked_limit, unpacks_to_too_much

_ROWS = 64  # turned into Python objects at once
_BUFFER_BYTES = 1 << 20
_LONG, _DENSE = 1 << 22, 50  # bytes of a column's chunk, and times its compressed size, from which a text may be long


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
