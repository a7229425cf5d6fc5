"""Parquet and Arrow files of ids become shards of ours: they cannot be read at any document, as shards can.

Special tokens at the ends of documents are taken off on the way, so that the outcome is what data_prep/prepare.py would
have written of the same text. Each part is a file.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from numpy.typing import NDArray

from data_prep.adoption.findings import Counting, describe
from data_prep.adoption.layout import id_column_of, require_one_split
from data_prep.adoption.parts import Pass, Request
from data_prep.adoption.result import REPORT, claimed_for, digest, is_finished, write_report
from data_prep.adoption.result import describe as describe_folder
from data_prep.adoption.tokenizer_fit import DOCUMENTS, EachShard, end_tokens, spread
from data_prep.report import Fingerprint
from data_prep.write.merging import merge_split
from modernbert_train.core.files import publish
from modernbert_train.core.text import plural
from modernbert_train.data.dataset_card import TOKEN_COUNTS
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.vocabulary import read_vocabulary

_ROWS = 1024  # read at a time
_SHARD_BYTES = 1 << 24
_APART = 8  # rows between two that are compared with the tokenizer, and later this part of those before


@dataclass(frozen=True)
class Conversion(Pass):
    """A pass over files of ids.

    Attributes:
        files: the parts.
        tokenizer_sha256: of the tokenizer.
    """

    files: tuple[Path, ...]
    tokenizer_sha256: str

    def do(self, rank: int, counting: Counting) -> dict[str, Any]:
        """Convert one file."""
        from modernbert_train.data.shard_writer import ShardWriter  # imports streaming and torch, which takes seconds

        folder, file = self.file(rank, "shards"), self.files[rank]
        shutil.rmtree(folder, ignore_errors=True)
        writer: ShardWriter | None = None
        sample: list[NDArray[Any]] = []
        looked_at = 0
        for number, ids in enumerate(rows_of(file, self.column)):
            if number == looked_at:
                looked_at += max(_APART, number // _APART)
                sample.append(ids)
                if len(sample) == DOCUMENTS:
                    self.fit.require(f"{file}, rows up to {number:,} of it", sample)
                    sample = []
            left = counting.take(ids, str(file), number)
            if len(left):
                writer = writer or ShardWriter(folder, self.vocab_size, self.tokenizer_sha256, _SHARD_BYTES)
                writer.write(left.tolist())
        self.fit.require(f"{file}, its last rows", sample)
        if writer is not None:
            writer.finish()
        counting.finish()
        return {}


def convert(request: Request, files: Sequence[Path]) -> str:
    """Convert files of ids; result and errors as of data_prep/adopt.py's `adopt`."""
    source = Path(request.source)
    if request.out is None:
        raise ConfigError(
            f"{source}: {files[0].suffix[1:]} files are converted to shards. Name their folder with --out."
        )
    if source.is_dir():  # of the hub's layouts: a folder for each split, or files that begin with its name
        below = [file.relative_to(source) for file in files]
        require_one_split(
            str(source), (path.parts[0] if len(path.parts) > 1 else path.name.split("-")[0] for path in below)
        )
    column = request.column or _id_column(files[0])
    folder, vocabulary, names = Path(request.out), read_vocabulary(request.tokenizer), end_tokens(request.tokenizer)
    sizes = [file.stat().st_size for file in files]
    states = [[str(file), size, file.stat().st_mtime_ns] for file, size in zip(files, sizes, strict=True)]
    asked: Fingerprint = {
        "tables": str(source.resolve()),
        "column": column,
        "tokenizer": vocabulary.sha256,
        "files": digest(states),
    }
    if is_finished(folder, asked, request.overwrite):
        return f"already converted; --overwrite does it again\n{describe_folder(folder)}"
    if folder.exists() and not (folder / REPORT).exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder}: is not empty, and is not touched. Give another folder with --out.")
    started, work = time.monotonic(), folder.with_name(f"{folder.name}.work")
    with claimed_for(asked, work):
        fit = EachShard(request.tokenizer, names, request.anyway)
        job = Conversion(work, column, vocabulary.num_entries, fit, tuple(files), vocabulary.sha256)
        chosen = [files[i] for i in spread(len(files), DOCUMENTS)]
        firsts = ((str(file), next(rows_of(file, column), None)) for file in chosen)
        found, facts = job.run(request, firsts, len(files), sum(sizes))
        whole = work / "whole"
        shutil.rmtree(whole, ignore_errors=True)
        merge_split([job.file(rank, "shards") for rank in range(len(files))], whole)
        lines = list(describe(found, np.load(whole / TOKEN_COUNTS), names))
        lines.append(f"converted from {plural(len(files), 'file')}, column {column}")
        facts |= {
            "tokenizer_sha256": vocabulary.sha256,
            "found": lines,
            "notes": [],
            "seconds": {"all": round(time.monotonic() - started, 1)},
        }
        write_report(whole / REPORT, asked, facts)
        replaced = publish(whole, folder)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
    return describe_folder(folder)


def rows_of(file: Path, column: str) -> Iterator[NDArray[Any]]:
    """The ids of each row, in order; a row without is an empty array.

    Raises:
        DataError: the file is damaged, or the column holds something else.
    """
    with _told(file):
        for batch in _batches(file, [column]):
            yield from _rows(batch.column(column))


@contextmanager
def _told(file: Path) -> Iterator[None]:
    try:
        yield
    except (pyarrow.ArrowException, OSError, KeyError, ValueError, StopIteration) as error:
        raise DataError(f"{file}: cannot be read as ids ({' '.join(str(error).split())}). Fetch it again.") from None


def _batches(file: Path, columns: list[str] | None) -> Iterator[pyarrow.RecordBatch]:
    if file.suffix == ".parquet":
        with pyarrow.parquet.ParquetFile(file) as table:
            yield from table.iter_batches(_ROWS, columns=columns)
        return
    with pyarrow.memory_map(str(file)) as content:
        try:  # `datasets` writes streams; a file with a footer is the other form
            batches = iter(pyarrow.ipc.open_stream(content))
        except pyarrow.ArrowInvalid:
            content.seek(0)
            table = pyarrow.ipc.open_file(content)
            batches = (table.get_batch(number) for number in range(table.num_record_batches))
        for batch in batches:
            yield from (batch.slice(at, _ROWS) for at in range(0, batch.num_rows, _ROWS))


def _rows(rows: Any) -> Iterator[NDArray[Any]]:
    kind, are = rows.type, pyarrow.types
    if not (are.is_list(kind) or are.is_large_list(kind) or are.is_fixed_size_list(kind)) or not are.is_integer(
        kind.value_type
    ):
        raise ValueError(f"it is {kind}, and no list of integers")
    for row in rows:
        ids = row.values
        if ids is None:
            yield np.zeros(0, np.int64)
        elif ids.null_count:
            raise ValueError("an id is null")
        else:
            yield ids.to_numpy(zero_copy_only=False)


def _id_column(file: Path) -> str:
    is_parquet = file.suffix == ".parquet"
    with _told(file):
        schema = pyarrow.parquet.read_schema(file) if is_parquet else next(_batches(file, None)).schema
    columns = {field.name: field.type for field in schema}
    return id_column_of(str(file), columns, "parquet" if is_parquet else "hub", str(file.parent))
