"""Parquet and Arrow files of ids become shards of ours: they cannot be read at any document, as shards can.

Special tokens at the ends of documents are taken off on the way, so that the outcome is what data_prep/prepare.py would
have written of the same text. Each part is a file, or some row groups of one.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from numpy.typing import NDArray

from data_prep.adoption.findings import Counting, Findings, describe
from data_prep.adoption.layout import HELD_OUT, ID_COLUMNS, TEXT_COLUMNS
from data_prep.adoption.parts import run_parts
from data_prep.adoption.result import REPORT, claimed, digest, is_finished, write_report
from data_prep.adoption.result import describe as describe_folder
from data_prep.adoption.tokenizer_fit import DOCUMENTS, EachShard, end_tokens, require_fit, spread, take_sample
from data_prep.write.merging import merge_split
from modernbert_train.data.dataset_card import TOKEN_COUNTS
from modernbert_train.errors import ConfigError, DataError, StorageError
from modernbert_train.files import publish, write_whole
from modernbert_train.text import plural
from modernbert_train.vocabulary import read_vocabulary

_PART_BYTES = 1 << 28  # of a file
_ROWS = 1024  # read at a time
_SHARD_BYTES = 1 << 24
_APART = 8  # rows between two that are compared with the tokenizer, and later this part of those before


@dataclass(frozen=True)
class Table:
    """A file, or some row groups of a Parquet file; all of them where `end` is None."""

    path: str
    begin: int = 0
    end: int | None = None


@dataclass(frozen=True)
class Conversion:
    """The parts of a dataset; pickled and sent to whoever does one.

    Attributes:
        work: folder in which the parts' shards go.
        tables: the parts.
        column: that holds the ids.
        vocab_size, tokenizer_sha256: of the tokenizer.
        special: ids that are taken off the ends of documents.
        fit: of the tokenizer to rows of each part.
    """

    work: Path
    tables: tuple[Table, ...]
    column: str
    vocab_size: int
    tokenizer_sha256: str
    special: frozenset[int]
    fit: EachShard

    def run_task(self, rank: int) -> None:
        """Convert one part.

        Raises:
            DataError: the file is damaged, or holds something else than ids of this vocabulary.
            StorageError: the disk refuses the shards.
        """
        from modernbert_train.data.shard_writer import ShardWriter  # imports streaming and torch, which takes seconds

        folder, table = self.shards(rank), self.tables[rank]
        shutil.rmtree(folder, ignore_errors=True)
        counting = Counting(self.special, self.vocab_size)
        writer: ShardWriter | None = None
        try:
            sample: list[NDArray[Any]] = []
            looked_at = 0
            for number, ids in enumerate(rows_of(table, self.column)):
                if number == looked_at:
                    looked_at += max(_APART, number // _APART)
                    sample.append(ids)
                    if len(sample) == DOCUMENTS:
                        self.fit.require(f"{table.path}, rows up to {number:,} of it", sample)
                        sample = []
                try:
                    left = counting.take(ids)
                except ValueError as error:
                    raise DataError(
                        f"{table.path}: row {number} of it {error}. The ids belong to another tokenizer; name theirs "
                        "with --tokenizer."
                    ) from None
                if not len(left):
                    continue
                writer = writer or ShardWriter(folder, self.vocab_size, self.tokenizer_sha256, _SHARD_BYTES)
                writer.write(left.tolist())
            self.fit.require(f"{table.path}, its last rows", sample)
            if writer is not None:
                writer.finish()
            counting.finish()
            write_whole(self.work / f"{rank:05d}.json", json.dumps(counting.findings.to_json()))
        except OSError as error:
            raise StorageError(
                f"{error.filename or self.work}: {error.strerror}. Free space; the same command resumes."
            ) from None

    def shards(self, rank: int) -> Path:
        return self.work / f"shards-{rank:05d}"


def convert(
    source: str,
    files: Sequence[Path],
    tokenizer: str,
    out: str | None,
    column: str | None,
    workers: int | None,
    overwrite: bool,
    anyway: bool,
) -> str:
    """Convert files of ids; arguments, result and errors as of data_prep/adopt.py's `adopt`."""
    if out is None:
        raise ConfigError(
            f"{source}: {files[0].suffix[1:]} files are converted to shards. Name their folder with --out."
        )
    _require_one_split(source, files)
    name = column or _id_column(files[0])
    folder, vocabulary, names = Path(out), read_vocabulary(tokenizer), end_tokens(tokenizer)
    states = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    asked: dict[str, str | None] = {
        "tables": str(Path(source).resolve()),
        "column": name,
        "tokenizer": vocabulary.sha256,
        "files": digest(states),
    }
    if is_finished(folder, asked, overwrite):
        return f"already converted; --overwrite does it again\n{describe_folder(folder)}"
    if folder.exists() and not (folder / REPORT).exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder}: is not empty, and is not touched. Give another folder with --out.")
    started = time.monotonic()
    work = folder.with_name(f"{folder.name}.work")
    with claimed(work, asked):
        tables = tuple(table for file in files for table in _cut(file))
        sample = take_sample(_firsts([tables[i] for i in spread(len(tables), DOCUMENTS)], name), tokenizer, names)
        require_fit(sample, source, tokenizer, anyway)
        fit = EachShard(tokenizer, names, anyway)
        job = Conversion(work, tables, name, vocabulary.num_entries, vocabulary.sha256, frozenset(names), fit)
        size = sum(file.stat().st_size for file in files)
        run_parts(job, len(tables), work, workers or min(len(os.sched_getaffinity(0)), 1 + size // (1 << 26)))
        found = Findings()
        for rank in range(len(tables)):
            found.add(Findings.from_json(json.loads((work / f"{rank:05d}.json").read_text(encoding="utf-8"))))
        if not found.tokens:
            raise DataError(f"{source}: the files hold no tokens.")
        whole = work / "whole"
        shutil.rmtree(whole, ignore_errors=True)
        merge_split([job.shards(rank) for rank in range(len(tables))], whole)
        lines = list(describe(found, np.load(whole / TOKEN_COUNTS), names))
        lines.append(f"converted from {plural(len(files), 'file')}, column {name}")
        facts = {
            "tokenizer": tokenizer,
            "tokenizer_sha256": vocabulary.sha256,
            "found": lines,
            "notes": [],
            **sample.to_json(),
            "findings": found.to_json(),
            "seconds": {"all": round(time.monotonic() - started, 1)},
        }
        write_report(whole / REPORT, asked, facts)
        replaced = publish(whole, folder)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
        shutil.rmtree(work, ignore_errors=True)
    return describe_folder(folder)


def rows_of(table: Table, column: str) -> Iterator[NDArray[Any]]:
    """The ids of each row, in order; a row without is an empty array.

    Raises:
        DataError: the file is damaged, or the column holds something else.
    """
    try:
        for batch in _batches(table, column):
            yield from _rows(batch.column(column))
    except (pyarrow.ArrowException, OSError, KeyError, ValueError) as error:
        words = " ".join(str(error).split())
        raise DataError(
            f"{table.path}: column {column} cannot be read as ids ({words}). Fetch the file again."
        ) from None


def _batches(table: Table, column: str) -> Iterator[pyarrow.RecordBatch]:
    if table.path.endswith(".parquet"):
        with pyarrow.parquet.ParquetFile(table.path) as file:
            end = file.num_row_groups if table.end is None else table.end
            yield from file.iter_batches(_ROWS, row_groups=range(table.begin, end), columns=[column])
        return
    with pyarrow.memory_map(table.path) as file:
        for batch in _arrow_batches(file):
            yield from (batch.slice(at, _ROWS) for at in range(0, batch.num_rows, _ROWS))


def _arrow_batches(file: Any) -> Iterator[pyarrow.RecordBatch]:
    """`datasets` writes streams; a file with a footer is the other form."""
    try:
        yield from pyarrow.ipc.open_stream(file)
    except pyarrow.ArrowInvalid:
        file.seek(0)
        reader = pyarrow.ipc.open_file(file)
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))


def _rows(rows: Any) -> Iterator[NDArray[Any]]:
    kind = rows.type
    if not (
        pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind)
    ) or not pyarrow.types.is_integer(kind.value_type):
        raise ValueError(f"it is {kind}, and no list of integers")
    for row in rows:
        ids = row.values
        if ids is None:
            yield np.zeros(0, np.int64)
        elif ids.null_count:
            raise ValueError("an id is null")
        else:
            yield ids.to_numpy(zero_copy_only=False)


def _cut(file: Path) -> Iterator[Table]:
    """A file as parts of some row groups, by its size."""
    if file.suffix != ".parquet" or (size := file.stat().st_size) <= _PART_BYTES:
        yield Table(str(file))
        return
    try:
        groups = pyarrow.parquet.ParquetFile(file).num_row_groups
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: cannot be read ({' '.join(str(error).split())}). Fetch it again.") from None
    parts = min(groups, -(-size // _PART_BYTES))
    for part in range(parts):
        yield Table(str(file), groups * part // parts, groups * (part + 1) // parts)


def _firsts(tables: Sequence[Table], column: str) -> list[tuple[str, NDArray[Any]]]:
    firsts = ((table.path, next(rows_of(table, column), None)) for table in tables)
    return [(path, ids) for path, ids in firsts if ids is not None]


def _id_column(file: Path) -> str:
    try:
        if file.suffix == ".parquet":
            schema = pyarrow.parquet.read_schema(file)
        else:
            with pyarrow.memory_map(str(file)) as content:
                schema = next(_arrow_batches(content)).schema
    except (pyarrow.ArrowException, OSError, StopIteration) as error:
        raise DataError(f"{file}: cannot be read ({' '.join(str(error).split())}). Fetch it again.") from None
    for name in ID_COLUMNS:
        if name in schema.names:
            return name
    for name in TEXT_COLUMNS:
        if name in schema.names:
            kind = "parquet" if file.suffix == ".parquet" else "hub"
            raise ConfigError(
                f"{file}: holds text (column {name}) and no ids. Tokenise it: python -m modernbert_train prepare "
                f"out=data/mine sources.mine={{kind: {kind}, path: {file.parent}, text_field: {name}}} "
                "tokenizer.path=TOKENIZER"
            )
    raise ConfigError(
        f"{file}: no column {' or '.join(ID_COLUMNS)} among {', '.join(schema.names)}. Name it with --column."
    )


def _require_one_split(source: str, files: Sequence[Path]) -> None:
    """Splits of the hub's layouts: a folder for each, or files that begin with its name."""
    if Path(source).is_file():
        return
    below = [file.relative_to(source) for file in files]
    names = {path.parts[0] if len(path.parts) > 1 else path.name.split("-")[0] for path in below}
    held_out = sorted(name for name in names if name in HELD_OUT)
    if held_out and len(names) > 1:
        raise ConfigError(
            f"{source}: holds {', '.join(sorted(names))}, which must not be trained on together. Convert one after the "
            "other: name its folder, or its file."
        )
