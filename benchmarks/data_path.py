"""Tokens a second on the way from shards to batches, one process, beside Streaming's own dataset in the same run.

    python -m benchmarks.data_path                 # three minutes
    python -m benchmarks.data_path --documents 4000

Documents are synthetic: log-normal lengths with a median of about 330 tokens, ids of a vocabulary of 50,000 that are as
frequent as words are, so that the zstd shards compress as text does. Every round reads a fresh copy of the shards, so
each case decompresses them. StreamingDataset is timed from its first sample on, without its start-up. The planner is
every rank's overhead for the whole job; reading, packing and masking is one worker's rate. The long documents have
5,000,000 tokens each, cut into thousands of chunks.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

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

VOCAB_SIZE = 50_048
ROUNDS = 3
PLAN_SECONDS = 0.5  # of CPU
STREAMING = "StreamingDataset, shuffled, tokens only"
Rate = tuple[int, float, float]  # tokens, and the seconds and the CPU seconds they took


class Clock:
    """Seconds since it was made, and CPU seconds of this process and its workers that have ended."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), cpu_seconds()

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self._wall, cpu_seconds() - self._cpu


def cpu_seconds() -> float:
    """In microseconds' steps, unlike `os.times`, in one tick of which the planner is through with all documents."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=30_000)
    documents = parser.parse_args().documents
    lengths = np.clip(np.random.default_rng(0).lognormal(5.8, 0.9, documents), 5, 20_000).astype(np.uint32)
    with tempfile.TemporaryDirectory() as name:
        short, long = Path(name) / "short", Path(name) / "long"
        write_shards(short, lengths)
        write_shards(long, np.full(3, 5_000_000, np.uint32))
        cases: dict[str, tuple[Path, Callable[[Path], Rate]]] = {
            STREAMING: (short, read_streaming),
            "TokenShards.read, shuffled, tokens only": (short, read_tokens),
            "loader: read, pack, mask, rows of 1,024": (short, lambda folder: load(folder, 1024)),
            "the same in a worker process": (short, lambda folder: load(folder, 1024, num_workers=1)),
            "the same, long documents": (long, lambda folder: load(folder, 1024)),
            "loader: read, pack, mask, rows of 8,192": (short, lambda folder: load(folder, 8192)),
            "planner alone, rows of 1,024": (short, lambda _: plan(lengths, 1024)),
            "planner alone, rows of 8,192": (short, lambda _: plan(lengths, 8192)),
        }
        rates: dict[str, list[tuple[float, float]]] = {case: [] for case in cases}
        for _ in range(ROUNDS):  # in turns, so that a busy machine disturbs all alike
            for case, (folder, run) in cases.items():
                fresh = Path(shutil.copytree(folder, Path(name) / "fresh"))
                tokens, seconds, cpu_seconds = run(fresh)
                rates[case].append((tokens / seconds / 1e6, tokens / cpu_seconds / 1e6))
                shutil.rmtree(fresh)
        stored = sum(path.stat().st_size for path in short.glob("shard.*"))
    middle = {case: [sorted(column)[ROUNDS // 2] for column in zip(*each, strict=True)] for case, each in rates.items()}
    print(f"{documents:,} documents, {int(lengths.sum()):,} tokens, {stored / lengths.sum():.2f} bytes a token on disk")
    print(f"median of {ROUNDS} rounds; M tokens a second, M tokens a CPU second, both over StreamingDataset's")
    for case, (rate, cpu_rate) in middle.items():
        times = [f"{rate / middle[STREAMING][0]:.1f} x", f"{cpu_rate / middle[STREAMING][1]:.1f} x"]
        print(f"  {case:42} {rate:8.2f} {cpu_rate:8.2f}   {times[0]:>8} {times[1]:>8}")
    for row_tokens in (1024, 8192):
        print(f"  packing efficiency, rows of {row_tokens:,}: {efficiency(lengths, row_tokens):.2%}")


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


def plans(lengths: np.ndarray, row_tokens: int, shard_documents: Sequence[int] | np.ndarray) -> BatchPlanner:
    return BatchPlanner(run_config(row_tokens), {"train": ShuffledChunks(shard_documents, lengths, 16, seed=17)})


def one_epoch(planner: BatchPlanner) -> Iterator[tuple[int, int]]:
    """Tokens and capacity of each batch until the planner begins its second pass."""
    for batch in planner:
        if batch.streams[0].epoch:
            return
        yield batch.tokens, batch.num_rows * batch.row_tokens


def plan(lengths: np.ndarray, row_tokens: int) -> Rate:
    """Passes over the documents, each from its beginning, until they have taken long enough to be timed."""
    next(one_epoch(plans(lengths, row_tokens, [len(lengths)])))  # loads what is compiled
    clock, tokens = Clock(), 0
    while clock.read()[1] < PLAN_SECONDS:
        tokens += sum(tokens for tokens, _ in one_epoch(plans(lengths, row_tokens, [len(lengths)])))
    return tokens, *clock.read()


def efficiency(lengths: np.ndarray, row_tokens: int) -> float:
    tokens, capacity = np.array(list(one_epoch(plans(lengths, row_tokens, [len(lengths)])))).sum(axis=0)
    return float(tokens / capacity)


def read_tokens(folder: Path) -> Rate:
    clock = Clock()
    shards = TokenShards(folder, "tokens", VOCAB_SIZE, max_open_shards=64)
    order = np.random.default_rng(0).permutation(len(shards.lengths))
    return sum(len(shards.read(int(document))) for document in order), *clock.read()


def load(folder: Path, row_tokens: int, num_workers: int = 0) -> Rate:
    clock = Clock()
    shards = TokenShards(folder, "tokens", VOCAB_SIZE, max_open_shards=64)
    vocabulary = Vocabulary(
        VOCAB_SIZE, cls_id=2, sep_id=3, pad_id=0, mask_id=4, ordinary=np.arange(5, VOCAB_SIZE), sha256=""
    )
    streams = TokenStreams([Stream("train", 17, shards)])
    loader = PackedLoader(
        plans(shards.lengths, row_tokens, shards.shard_documents),
        MicrobatchMaker(streams, partial(build_objective, vocabulary=vocabulary), vocabulary),
        rank=0,
        num_ranks=1,
        num_workers=num_workers,
        prefetch_batches=2,
    )
    tokens = 0
    batches = iter(loader)
    for batch in batches:
        if batch.plan.streams[0].epoch:
            break
        tokens += batch.plan.tokens
    seconds, _ = clock.read()
    batches.close()  # type: ignore[attr-defined]  # ends the workers, whose time is known then
    return tokens, seconds, clock.read()[1]


def read_streaming(folder: Path) -> Rate:
    from streaming import StreamingDataset

    dataset = iter(StreamingDataset(local=str(folder), shuffle=True, batch_size=1, num_canonical_nodes=1))
    next(dataset)
    clock = Clock()
    return sum(len(sample["tokens"]) for sample in dataset), *clock.read()


if __name__ == "__main__":
    main()
