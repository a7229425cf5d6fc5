"""A pass over shards: lengths, counts, hashes and findings. A process holds one shard at a time.

The pass is cut into parts that any process may do. A part is complete once its JSON file exists, and does not depend on
the process that did it, so after a kill only the missing parts are done again.
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
from data_prep.tasks.task_workers import Workers
from modernbert_train.core.files import whole_file, write_whole
from modernbert_train.data.download import Downloader
from modernbert_train.data.remote import is_remote
from modernbert_train.data.shard_file import IdColumn, as_line, fault_of, hash_of, unpack
from modernbert_train.data.shard_index import stored
from modernbert_train.errors import DataError, RunError

PART_BYTES = 1 << 28  # of shards as stored; an interrupted part is done again
_WORKER_BYTES = 1 << 27  # a process takes seconds to import its modules
_HASH = "xxh64"
_BEGINNING = 2048  # tokens
_OTHER_IDS = "Name the column that holds integer ids with --column, and their type with --dtype if they are raw bytes"


@dataclass(frozen=True)
class Survey:
    """A pass over shards, cut by `write_parts`; pickled and sent to worker processes.

    Attributes:
        work: folder for the results of the parts.
        root: folder or URL of the shards.
        column, dtype: see `IdColumn`.
        vocab_size: one more than the largest id allowed.
        fit: check of the tokenizer against documents of each shard.
    """

    work: Path
    root: str
    column: str
    dtype: str | None
    vocab_size: int
    fit: EachShard

    def run(self, num_parts: int, size: int, workers: int | None) -> Findings:
        """Do the missing parts; return the findings of all parts.

        Args:
            num_parts: number of parts.
            size: of all shards, in bytes.
            workers: number of processes; None: one for each core.

        Raises:
            DataError: see `run_task`; or there are no tokens.
            RunError: a process died.
        """
        ranks = [rank for rank in range(num_parts) if not self.file(rank, "json").exists()]
        number = workers or min(len(os.sched_getaffinity(0)), 1 + size // _WORKER_BYTES)
        with Workers(number, "give fewer --workers") as pool:
            pool.run(self, ranks, "parts", num_parts)
        findings = Findings()
        for rank in range(num_parts):
            findings.add(Findings.from_json(self.left(rank)["findings"]))
        if not findings.tokens:
            raise DataError(f"{self.root}: holds no tokens.")
        return findings

    def run_task(self, rank: int) -> None:
        """Do a part: count its documents; write their lengths, counts, and entries with hashes.

        Raises:
            DataError: a file is missing, damaged, or holds something else than ids of this vocabulary.
        """
        counting = Counting(self.fit.special.keys(), self.vocab_size)
        entries = json.loads(self.file(rank, "shards").read_text(encoding="utf-8"))
        for entry in entries:
            self._take(entry, counting)
        counting.finish()
        with whole_file(self.file(rank, "npz")) as file:
            np.savez(file, lengths=np.array(counting.lengths, np.uint32), counts=counting.counts)
        result = {"findings": counting.findings.to_json(), "entries": entries}
        write_whole(self.file(rank, "json"), json.dumps(result))

    def file(self, rank: int, end: str) -> Path:
        return self.work / f"{rank:05d}.{end}"

    def left(self, rank: int) -> dict[str, Any]:
        """Return the content of a part's JSON file."""
        content: dict[str, Any] = json.loads(self.file(rank, "json").read_text(encoding="utf-8"))
        return content

    def array(self, rank: int, name: str) -> NDArray[Any]:
        """Return an array of a part: `lengths`, uint32 [documents], or `counts`, int64 [entries of the vocabulary]."""
        with np.load(self.file(rank, "npz"), allow_pickle=False) as arrays:
            array: NDArray[Any] = arrays[name]
            return array

    def first(self, entry: Entry) -> NDArray[Any] | None:
        """Return the beginning of a shard's first document as stored; None if the shard is empty.

        Raises:
            DataError: see `run_task`.
        """
        ids = next(self._documents(entry, self._bytes(entry)), None)
        return None if ids is None else ids[:_BEGINNING].copy()  # a view would keep the shard in memory

    def _take(self, entry: Entry, counting: Counting) -> None:
        data, findings = self._bytes(entry), counting.findings
        has_hash = bool(stored(entry)["hashes"])
        findings.verified += has_hash
        findings.hashed += not has_hash
        if not has_hash:
            stored(entry)["hashes"] = {_HASH: hash_of(_HASH, data)}
        dtypes, sample, origin = set(), [], self.name(entry)
        looked_at = spread(entry["samples"], DOCUMENTS)
        for number, ids in enumerate(self._documents(entry, data)):
            dtypes.add(ids.dtype)
            if number in looked_at:
                sample.append(ids[:_BEGINNING])
            counting.take(ids, origin, number)
        self.fit.require(origin, sample)
        for dtype in dtypes:
            findings.add_dtype(os.path.dirname(stored(entry)["basename"]), dtype)

    def _documents(self, entry: Entry, data: bytes) -> Iterator[NDArray[Any]]:
        what = ""
        try:  # the bytes may be anything, and numpy raises many kinds of errors
            shard, ids_of = unpack(entry, data), IdColumn(entry, self.column, self.dtype)
            for number in range(len(shard.offsets) - 1):
                what = f"document {number} "
                ids = as_line(ids_of(shard.sample(number)))
                if ids.ndim != 1 or ids.dtype.kind not in "iu":
                    raise ValueError(f"{ids.dtype} of shape {ids.shape}, not a line of token ids")
                yield ids
        except RunError:  # raised by the caller, while it handles a document
            raise
        except Exception as error:  # files of other programs can be wrong in any way
            raise self._broken(entry, f"{what}does not match index.json ({error})", _OTHER_IDS) from None

    def _bytes(self, entry: Entry) -> bytes:
        """Read a shard's file and check it against the index."""
        basename = stored(entry)["basename"]
        if is_remote(self.root):
            with TemporaryDirectory(dir=self.work) as scratch:
                downloader = Downloader(self.root, TIMEOUT_SECONDS)
                data = downloader.fetch(basename, Path(scratch), stored(entry)["bytes"]).read_bytes()
        else:
            data = Path(self.root, basename).read_bytes()
        fault = fault_of(entry, data)
        if fault is not None:
            raise self._broken(entry, fault)
        return data

    def name(self, entry: Entry) -> str:
        return f"{self.root}/{stored(entry)['basename']}"

    def _broken(self, entry: Entry, problem: str, remedy: str = "Copy it again") -> DataError:
        return DataError(f"{self.name(entry)}: {problem}. {remedy}; nothing was adopted.")


def write_parts(work: Path, entries: Sequence[Entry]) -> int:
    """Cut shards into parts, and write the entries of each into a file; return the number of parts."""
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
