"""Parquet by pyarrow and datasets of the Hugging Face hub by `datasets`, row by row.

A Parquet file can be cut between its row groups, and a hub dataset between its shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from data_prep.read.items import Columns, LeftOut, Row, Span, no_column, no_lines
from modernbert_train.config.tools.prepare import RowSourceConfig
from modernbert_train.core.files import anything_as
from modernbert_train.data.hub import open_dataset
from modernbert_train.data.parquet import open_parquet, parquet_rows
from modernbert_train.errors import DataError


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
            yield Row(f"{span.path}:{number}", row)


def hub_shards(name: str, source: RowSourceConfig) -> int:
    """Return the number of parts into which `datasets` cuts a dataset.

    Raises:
        DataError: it cannot be opened.
    """
    with _errors_of(name, source):
        return int(_hub_rows(source).num_shards)


def read_hub(span: Span, source: RowSourceConfig) -> Iterator[Row]:
    """Yield the rows of one part of a hub dataset.

    Raises:
        DataError: a row cannot be read, regardless of `on_error`: a network failure must not look like the end of the
            data.
    """
    shard, shards = span.begin, span.end or 1
    place = f"{source.path}/{source.split or 'train'}" + (f" part {shard + 1} of {shards}" if shards > 1 else "")
    with _errors_of(span.source, source):
        rows = _hub_rows(source)
        if shards > 1:
            rows = rows.shard(num_shards=shards, index=shard)
        for number, row in enumerate(rows, start=1):
            yield Row(f"{place}:{number}", row)


def _hub_rows(source: RowSourceConfig) -> Any:
    return open_dataset(str(source.path), source.subset, source.split or "train", streaming=True)


def _errors_of(name: str, source: RowSourceConfig) -> AbstractContextManager[None]:
    what = f"sources.{name}.path={source.path}: split {source.split or 'train'} cannot be read to its end"
    return anything_as(DataError, what, "Correct path, subset and split, or try again.")
