"""Parquet by pyarrow, CSV and datasets of the Hugging Face hub by `datasets`, row by row.

CSV is read as text: otherwise "007" becomes 7 and "NA" becomes null. A Parquet file can be cut between its row
groups, and a hub dataset where `datasets` itself cuts it; a CSV file cannot, because a cell may hold newlines.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data_prep.read.encodings import AUTO, UTF_8, codec_of, guess
from data_prep.read.items import NO_FIELDS, Document, LeftOut, decoded_as, take_text, unreadable
from data_prep.read.lines import open_unpacked
from modernbert_train.config.tools.prepare import SourceConfig
from modernbert_train.errors import DataError

_ROWS = 64  # turned into Python objects at once
_BUFFER_BYTES = 1 << 20


def parquet_groups(file: Path) -> list[int]:
    """Bytes of each row group, decompressed; empty when the file is damaged, which reading will report."""
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.read_metadata(file)
    except (OSError, ValueError):  # pyarrow's own errors are both
        return []
    return [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]


def read_parquet(
    file: Path, text_field: str, begin: int = 0, end: int | None = None, fields: Mapping[str, str] = NO_FIELDS
) -> Iterator[Document | LeftOut]:
    """Yield the rows of the row groups [begin, end); None is the last."""
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False) as table:
            names = table.schema_arrow.names
            if text_field not in names:
                raise ValueError(f"no column {text_field!r} among {', '.join(map(repr, names))}")
            number = sum(table.metadata.row_group(i).num_rows for i in range(begin))
            groups = list(range(begin, table.num_row_groups if end is None else end))
            columns = [column for column in fields.values() if column in names or column.split(".")[0] in names]
            columns = [text_field, *columns]
            for batch in table.iter_batches(_ROWS, row_groups=groups, columns=columns, use_threads=False):
                for row in batch.to_pylist():
                    number += 1
                    yield take_text(f"{file}:{number}", row, text_field, fields=fields)
    except Exception as error:  # whatever pyarrow raises; the rest of the span is lost with the row
        yield unreadable(f"{file}:{number + 1} and all after it", error)


def read_csv(
    file: Path, text_field: str, encoding: str = UTF_8, fields: Mapping[str, str] = NO_FIELDS
) -> Iterator[Document | LeftOut]:
    """Yield the rows of a CSV file, plain or .gz; `auto` reads it once more, to look at all of it."""
    import datasets  # slow to import, and needed by few

    options: dict[str, Any] = {"keep_default_na": False}
    number, altered = 0, None
    try:
        if encoding != UTF_8 and (codec := _codec(file, encoding)) != UTF_8:
            altered, options["encoding"] = decoded_as(codec), codec
        columns = list(dict.fromkeys([text_field, *_present(file, fields, options.get("encoding", "utf-8-sig"))]))
        features = datasets.Features({column: datasets.Value("string") for column in columns})
        options |= {"usecols": columns, "features": features}
        rows = datasets.load_dataset("csv", data_files=[str(file)], split="train", streaming=True, **options)
        for number, row in enumerate(rows, start=1):
            yield take_text(f"{file}:{number}", row, text_field, altered, fields)
    except Exception as error:  # whatever pandas raises; the rest of the file is lost with the row
        yield unreadable(f"{file}:{number + 1} and all after it", error)


def _present(file: Path, fields: Mapping[str, str], codec: str) -> list[str]:
    """Those columns of fields that a CSV file has."""
    if not fields:
        return []
    with open_unpacked(file) as content:
        head = next(csv.reader(io.TextIOWrapper(content, codec, newline="")), [])
    return [column for column in fields.values() if column in head]


def _codec(file: Path, encoding: str) -> str:
    """Python's name of a file's encoding, which takes the byte order mark off; UTF-8 where there is no guess."""
    with open_unpacked(file) as content:
        begin = content.read(_BUFFER_BYTES)
        found = codec_of(encoding, begin)
        if encoding == AUTO:
            found = guess(itertools.chain([begin], iter(lambda: content.read(_BUFFER_BYTES), b""))) or UTF_8
        return "utf-16" if found.startswith("utf-16") and begin[:2] in (b"\xff\xfe", b"\xfe\xff") else found


def hub_shards(name: str, source: SourceConfig) -> int:
    """How many parts `datasets` cuts a dataset into.

    Raises:
        DataError: it cannot be opened.
    """
    try:
        return int(_hub_rows(source).num_shards)
    except Exception as error:
        raise _hub_error(name, source, 0, error) from error


def read_hub(name: str, source: SourceConfig, shard: int, shards: int) -> Iterator[Document | LeftOut]:
    """Yield the rows of one part of a hub dataset.

    Raises:
        DataError: at any row that cannot be read, whatever `on_error` says: a network that fails must not look like
            the end of the data.
    """
    number = 0
    place = f"{source.path}/{source.split or 'train'}" + (f" part {shard + 1} of {shards}" if shards > 1 else "")
    try:
        rows = _hub_rows(source)
        if shards > 1:
            rows = rows.shard(num_shards=shards, index=shard)
        for number, row in enumerate(rows, start=1):
            yield take_text(f"{place}:{number}", row, source.text_field or "text", fields=source.fields)
    except Exception as error:
        raise _hub_error(name, source, number, error) from error


def _hub_rows(source: SourceConfig) -> Any:
    import datasets

    return datasets.load_dataset(source.path, source.subset, split=source.split or "train", streaming=True)


def _hub_error(name: str, source: SourceConfig, number: int, error: Exception) -> DataError:
    return DataError(
        f"sources.{name}.path={source.path}: row {number + 1} of split {source.split or 'train'} cannot be read "
        f"({type(error).__name__}: {' '.join(str(error).split())}). Correct path, subset and split, or try again."
    )
