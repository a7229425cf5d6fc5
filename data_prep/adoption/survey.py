"""One pass over the shards of others, in parts that any process may do: lengths, counts, hashes, and what is found.

What a part leaves is complete when its JSON file is there, and does not depend on who made it, so that after a kill the
parts that are missing are all that is done again. A process holds one shard at a time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.adoption.findings import Counting, Findings
from data_prep.adoption.layout import TIMEOUT_SECONDS, Entry
from data_prep.adoption.tokenizer_fit import DOCUMENTS, EachShard, spread
from modernbert_train.data.download import Downloader
from modernbert_train.data.remote import is_remote
from modernbert_train.data.shard_file import as_line, fault_of, hash_of, id_column, unpack
from modernbert_train.data.shard_index import stored
from modernbert_train.errors import DataError, StorageError
from modernbert_train.files import write_whole
from modernbert_train.own_files import require_own_file

PART_BYTES = 1 << 28  # of shards as stored; a part that was interrupted is done again
_HASH = "xxh64"
_BEGINNING = 2048  # tokens
_OTHER_IDS = "Name the column that holds integer ids with --column, and their type with --dtype if they are raw bytes"


@dataclass(frozen=True)
class Survey:
    """The parts of a dataset; pickled and sent to whoever does one.

    Attributes:
        work: folder in which parts lie, see `write_parts`, and what they leave.
        root: folder or URL of the shards.
        column, dtype: see `IdColumn`.
        vocab_size: one more than the largest id allowed.
        special: ids that are taken off the ends of documents.
        fit: of the tokenizer to each shard.
    """

    work: Path
    root: str
    column: str
    dtype: str | None
    vocab_size: int
    special: frozenset[int]
    fit: EachShard

    def run_task(self, rank: int) -> None:
        """Do one part, unless it is done.

        Raises:
            DataError: a shard is missing, damaged, or holds something else than ids of this vocabulary.
            StorageError: the disk refuses what is left.
        """
        if self._file(rank, "json").exists():
            return
        counting = Counting(self.special, self.vocab_size)
        entries = []
        for entry in read_entries(self._file(rank, "shards")):
            entries.append(self._take(entry, counting))
        counting.finish()
        try:
            with self._file(rank, "partial").open("wb") as file:
                np.savez(file, lengths=np.array(counting.lengths, np.uint32), counts=counting.counts)
            os.replace(self._file(rank, "partial"), self._file(rank, "npz"))
            left = {"findings": counting.findings.to_json(), "entries": entries}
            write_whole(self._file(rank, "json"), json.dumps(left))
        except OSError as error:
            raise StorageError(
                f"{error.filename or self.work}: {error.strerror}. Free space; the same command resumes."
            ) from None

    def result(self, rank: int) -> tuple[Findings, list[Entry], NDArray[np.uint32], NDArray[np.int64]]:
        """What a part left: findings, entries with hashes, lengths and counts."""
        left = json.loads(self._file(rank, "json").read_text(encoding="utf-8"))
        with np.load(self._file(rank, "npz"), allow_pickle=False) as arrays:
            return Findings.from_json(left["findings"]), left["entries"], arrays["lengths"], arrays["counts"]

    def first(self, entry: Entry) -> NDArray[Any] | None:
        """The beginning of a shard's first document as it is stored; None where it has none.

        Raises:
            DataError: see `run_task`.
        """
        ids = next(self._documents(entry, self._bytes(entry)), None)
        return None if ids is None else ids[:_BEGINNING].copy()  # a view would keep the shard in memory

    def _take(self, entry: Entry, counting: Counting) -> Entry:
        data = self._bytes(entry)
        has_hash = bool(stored(entry)["hashes"])
        counting.findings.verified += has_hash
        counting.findings.hashed += not has_hash
        if not has_hash:
            stored(entry)["hashes"] = {_HASH: hash_of(_HASH, data)}
        folder = os.path.dirname(stored(entry)["basename"])
        dtypes, sample = set(), []
        looked_at = spread(entry["samples"], DOCUMENTS)
        for number, ids in enumerate(self._documents(entry, data)):
            dtypes.add(ids.dtype)
            if number in looked_at:
                sample.append(ids[:_BEGINNING])
            try:
                counting.take(ids)
            except ValueError as error:
                raise DataError(
                    f"{self._name(entry)}: document {number} {error}. The shards belong to another tokenizer; name "
                    "theirs with --tokenizer."
                ) from None
        self.fit.require(self._name(entry), sample)
        if dtypes:
            known = counting.findings.dtypes.get(folder)
            counting.findings.dtypes[folder] = np.result_type(*dtypes, *([known] if known else [])).name
        return entry

    def _documents(self, entry: Entry, data: bytes) -> Iterator[NDArray[Any]]:
        try:
            shard = unpack(entry, data)
            ids_of = id_column(entry, self.column, self.dtype)
        except ValueError as error:
            raise self._broken(entry, str(error), _OTHER_IDS) from None
        for number in range(len(shard.offsets) - 1):
            try:
                ids = as_line(ids_of(shard.sample(number)))
            except Exception as error:  # the bytes may be anything, and numpy raises as many kinds
                found = f"document {number} cannot be decoded ({error})"
                raise self._broken(entry, found, _OTHER_IDS) from None
            if ids.ndim != 1 or ids.dtype.kind not in "iu":
                found = f"document {number} is {ids.dtype} of shape {ids.shape}, and no line of token ids"
                raise self._broken(entry, found, _OTHER_IDS)
            yield ids

    def _bytes(self, entry: Entry) -> bytes:
        """A shard's file, found to be what the index says."""
        basename = stored(entry)["basename"]
        if is_remote(self.root):
            with TemporaryDirectory(dir=self.work) as scratch:
                downloader = Downloader(self.root, TIMEOUT_SECONDS)
                data = downloader.fetch(basename, Path(scratch), stored(entry)["bytes"]).read_bytes()
        else:
            path = Path(self.root, basename)
            require_own_file(path, Path(self.root))
            try:
                data = path.read_bytes()
            except OSError as error:
                raise self._broken(entry, f"cannot be read ({error.strerror})") from None
        fault = fault_of(entry, data)
        if fault is not None:
            raise self._broken(entry, fault)
        return data

    def _name(self, entry: Entry) -> str:
        return f"{self.root}/{stored(entry)['basename']}"

    def _broken(self, entry: Entry, found: str, remedy: str = "Copy it again") -> DataError:
        return DataError(f"{self._name(entry)}: {found}. {remedy}; nothing was adopted.")

    def _file(self, rank: int, end: str) -> Path:
        return self.work / f"{rank:05d}.{end}"


def write_parts(work: Path, entries: Sequence[Entry]) -> int:
    """Cut shards into parts, and write the entries of each into a file; returns how many parts there are."""
    parts: list[list[Entry]] = []
    size = PART_BYTES
    for entry in entries:
        if size >= PART_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(entry)
        size += stored(entry)["bytes"]
    for rank, part in enumerate(parts):
        write_whole(work / f"{rank:05d}.shards", json.dumps(part))
    return len(parts)


def read_entries(path: Path) -> list[Entry]:
    entries: list[Entry] = json.loads(path.read_text(encoding="utf-8"))
    return entries
