"""Packing and the loader alone, on one core, with the parts of `benchmarks.packing` and `benchmarks.data_path`.

The floors are bytes at the rate of a copy: of the planner a length read and a chunk written for each document, of the
loader the ids in the shard, and ids, positions, and 30 % of positions and labels in the batch. Python and zstd are far
from them; what counts is that one core feeds a GPU, whose rate stands in `tok/s` of the other tables.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from benchmarks.data_path import load, read_tokens, write_shards
from benchmarks.measure import Case, Group, Stage, Work
from benchmarks.packing import planner_of

PLANNED_BYTES = 4 + 16  # of a document: its length; number, start, length and row of a chunk
READ_BYTES = 2  # of a token in a shard
LOADED_BYTES = READ_BYTES + 4 + 4 + 0.3 * (4 + 4)
ROW_LENGTHS = (1024, 8192)


def draw_documents(documents: int) -> np.ndarray:
    return np.clip(np.random.default_rng(0).lognormal(5.8, 0.9, documents), 5, 20_000).astype(np.uint32)


def packing_groups(batches: int) -> Iterator[Group]:
    """The planner, which places all documents of a job: so many batches of 98,304 tokens."""
    lengths = draw_documents(20_000)

    def case(row_tokens: int, streams: int) -> Case:
        def build() -> list[Stage]:
            tokens = sum(batch.tokens for batch in islice(planner_of(lengths, row_tokens, streams), batches))
            work = Work(bytes=PLANNED_BYTES * tokens / float(lengths.mean()), tokens=tokens)
            return [
                Stage("", lambda _: planner_of(lengths, row_tokens, streams)),
                Stage("plan", lambda planner: sum(batch.tokens for batch in islice(planner, batches)), work),
            ]

        return Case(f"rows of {row_tokens:,}, {streams} stream{'s' * (streams > 1)}", build)

    yield Group(f"packing, {batches} batches", [case(row, streams) for streams in (1, 3) for row in ROW_LENGTHS])


def loader_groups(documents: int) -> Iterator[Group]:
    """From shards on disk to batches; each round reads a fresh copy, so that it decompresses them."""
    lengths = draw_documents(documents)
    with tempfile.TemporaryDirectory() as name:
        folder, fresh = Path(name) / "shards", Path(name) / "fresh"
        write_shards(folder, lengths)

        def copy(_: object) -> Path:
            shutil.rmtree(fresh, ignore_errors=True)
            return Path(shutil.copytree(folder, fresh))

        def loading(row_tokens: int) -> Case:
            def build() -> list[Stage]:
                tokens = load(copy(None), row_tokens)[0]
                work = Work(bytes=LOADED_BYTES * tokens, tokens=tokens)
                return [Stage("", copy), Stage("load", lambda path: load(path, row_tokens), work)]

            return Case(f"read, pack, mask; rows of {row_tokens:,}", build)

        tokens = int(lengths.sum())
        read = Stage("read", read_tokens, Work(bytes=float(READ_BYTES * tokens), tokens=tokens))
        cases = [Case("read alone", lambda: [Stage("", copy), read]), *map(loading, ROW_LENGTHS)]
        yield Group(f"loader, {documents:,} documents", cases)
