"""Rows of Parquet files, by pyarrow, in bounded memory. A file can be cut between its row groups.

Dictionary encoding lets a file of kilobytes repeat one long text a million times. Such columns stay encoded, rows are
decoded one at a time, and the total size of their texts has the limit of compressed files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from modernbert_train.config.tools.prepare import RowSourceConfig
from modernbert_train.core.read_json import open_file
from modernbert_train.data.read.rows import Columns, LeftOut, Row, Span, no_column, no_lines
from modernbert_train.data.read.unpacked import unpacked_limit, unpacks_to_too_much

_ROWS = 64  # turned into Python objects at once
_BUFFER_BYTES = 1 << 20
_LONG, _DENSE = 1 << 22, 50  # larger column chunks may hold long texts: bytes, and times compressed size


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
    """Yield the rows of the row groups of a span. Raises ValueError if their texts exceed `unpacked_limit`."""
    requested = (*columns.required, *columns.optional)
    limit, size = unpacked_limit(span.file.stat().st_size), 0
    with _open(span.file, requested) as (table, at_once):
        names = table.schema_arrow.names
        if (problem := columns.lacking(names)) is not None:
            yield no_column(f"{span.path}: all rows", problem)
            return
        if not table.metadata.num_rows:
            yield no_lines(span.file)
        present = [c for c in requested if {c, c.split(".")[0]} & set(names)]
        groups = range(span.begin, table.num_row_groups if span.end is None else span.end)
        before = sum(table.metadata.row_group(i).num_rows for i in range(span.begin))
        batches = table.iter_batches(at_once, row_groups=list(groups), columns=present, use_threads=False)
        for number, row in enumerate(chain.from_iterable(map(_rows_of, batches)), start=before + 1):
            id = f"{span.path}:{number}"
            if isinstance(row, UnicodeDecodeError):
                detail = f"not UTF-8: byte 0x{row.object[row.start]:02x} at byte {row.start} of a text"
                yield LeftOut(id, "not_utf8", detail, line=number)
                continue
            size += sum(len(value) for value in row.values() if isinstance(value, str))
            if size > limit:
                raise unpacks_to_too_much(limit)
            yield Row(id, row, line=number)


def _rows_of(batch: Any) -> Iterator[dict[str, Any] | UnicodeDecodeError]:
    """Yield the rows of a batch, and the error of one with a text that is not UTF-8."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            yield error
            return
        for number in range(batch.num_rows):
            yield from _rows_of(batch.slice(number, 1))


@contextmanager
def _open(path: Path, columns: Sequence[str]) -> Iterator[tuple[Any, int]]:
    """Open a file; yield it with the number of rows to read at once. Suspiciously dense columns stay dictionaries.

    Raises:
        OSError: it cannot be read, or is a pipe or a device.
        pyarrow.ArrowException: it is damaged.
    """
    import pyarrow.parquet

    open_file(path).close()
    settings: dict[str, Any] = {"buffer_size": _BUFFER_BYTES, "pre_buffer": False}
    with pyarrow.parquet.ParquetFile(path, **settings) as table:
        dense = _dense(table.metadata, columns)
        if not dense:
            yield table, _ROWS
            return
    with pyarrow.parquet.ParquetFile(path, read_dictionary=dense, **settings) as table:
        yield table, 1


def _dense(metadata: Any, columns: Sequence[str]) -> list[str]:
    paths: set[str] = set()
    tops = {column.split(".")[0] for column in columns}
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for chunk in map(group.column, range(group.num_columns)):
            long = chunk.total_uncompressed_size > max(_LONG, _DENSE * chunk.total_compressed_size)
            if long and chunk.path_in_schema.split(".")[0] in tops and chunk.physical_type == "BYTE_ARRAY":
                paths.add(chunk.path_in_schema)
    return sorted(paths)
