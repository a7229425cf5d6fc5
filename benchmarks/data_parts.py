"""Packing and the loader alone, on one core, with the planner of `benchmarks.packing`.

The floors are bytes at the rate of a copy: of the planner a length read and a chunk written for each document, of the
loader the ids in the shard, and ids, positions, and 30 % of positions and labels in the batch. Python and zstd are far
from them; what counts is that one core feeds a GPU, whose rate stands in `tok/s` of the other tables.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import islice, takewhile
from pathlib import Path

import numpy as np

from benchmarks.measure import Case, Group, Stage, Work
from benchmarks.packing import planner_of
from modernbert_train.clock import Clock
from modernbert_train.config.schema import DataConfig, OptimConfig, PhaseConfig, RunConfig
from modernbert_train.data.loader import PackedLoader
from modernbert_train.data.mds import TokenShards
from modernbert_train.data.microbatches import MicrobatchMaker
from modernbert_train.data.mixture import Stream, TokenStreams
from modernbert_train.data.planner import BatchPlanner
from modernbert_train.data.shard_writer import ShardWriter
from modernbert_train.data.shuffle import ShuffledChunks
from modernbert_train.objectives import build_objective
from modernbert_train.vocabulary import Vocabulary

PLANNED_BYTES = 4 + 16  # of a document: its length; number, start, length and row of a chunk
READ_BYTES = 2  # of a token in a shard
LOADED_BYTES = READ_BYTES + 4 + 4 + 0.3 * (4 + 4)
VOCAB_SIZE = 50_048
ROW_LENGTHS = (1024, 8192)


def write_shards(folder: Path, lengths: np.ndarray) -> None:
    """Ids as frequent as words are, by Zipf's law."""
    draw = np.random.default_rng(1)
    frequency = 1 / (np.arange(5, VOCAB_SIZE) + 2.7)
    boundaries = np.cumsum(frequency) / frequency.sum()
    writer = ShardWriter(folder, VOCAB_SIZE, "0" * 64, shard_bytes=1 << 24)
    for length in lengths:
        writer.write((5 + np.searchsorted(boundaries, draw.random(int(length)))).clip(5, VOCAB_SIZE - 1).tolist())
    writer.finish()


def run_config(row_tokens: int) -> RunConfig:
    phase = PhaseConfig(
        tokens=1 << 60, row_tokens=row_tokens, batch_rows=98_304 // row_tokens, microbatch_tokens=98_304
    )
    return RunConfig(
        name="benchmark",
        data=DataConfig(train="", tokenizer=""),
        optim=OptimConfig(name="none", lr=1.0),
        phases={"only": phase},
    )


def read_tokens(folder: Path) -> int:
    """Of all documents in a random order; gives their number."""
    shards = TokenShards(folder, "tokens", VOCAB_SIZE, max_open_shards=64)
    order = np.random.default_rng(0).permutation(len(shards.lengths))
    return sum(len(shards.read(int(document))) for document in order)


def load(folder: Path, row_tokens: int) -> int:
    """Tokens of one epoch, read, packed and masked in this process."""
    shards = TokenShards(folder, "tokens", VOCAB_SIZE, max_open_shards=64)
    vocabulary = Vocabulary(
        VOCAB_SIZE, cls_id=2, sep_id=3, pad_id=0, mask_id=4, ordinary=np.arange(5, VOCAB_SIZE), sha256=""
    )
    chunks = ShuffledChunks(shards.shard_documents, shards.lengths, 16, seed=17)
    config = run_config(row_tokens)
    loader = PackedLoader(
        BatchPlanner(config.data, Clock.of(config), {"train": chunks}),
        MicrobatchMaker(
            TokenStreams([Stream("train", 17, shards)]), partial(build_objective, vocabulary=vocabulary), vocabulary
        ),
        rank=0,
        num_ranks=1,
        num_workers=0,
        prefetch_batches=2,
    )
    plans = takewhile(lambda plan: not plan.streams[0].epoch, (batch.plan for batch in loader))
    return sum(plan.tokens for plan in plans)


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
                tokens = load(copy(None), row_tokens)
                work = Work(bytes=LOADED_BYTES * tokens, tokens=tokens)
                return [Stage("", copy), Stage("load", lambda path: load(path, row_tokens), work)]

            return Case(f"read, pack, mask; rows of {row_tokens:,}", build)

        tokens = int(lengths.sum())
        read = Stage("read", read_tokens, Work(bytes=float(READ_BYTES * tokens), tokens=tokens))
        cases = [Case("read alone", lambda: [Stage("", copy), read]), *map(loading, ROW_LENGTHS)]
        yield Group(f"loader, {documents:,} documents", cases)
