"""How full rows are and how fast batches are planned, from document lengths alone; compared with best fit.

    python -m benchmarks.packing                                   # two minutes, log-normal lengths
    python -m benchmarks.packing data/mine/train/lengths.npy ...   # each file, and all of them together
    python -m benchmarks.packing --languages 2000                  # a minute: streams whose shares are by alpha

Best fit puts each chunk into the fullest of 64 open rows that can hold it, as published packers do. Streams have equal
documents; three streams have shares of 60, 30 and 10 % of the text.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from modernbert_train.clock import Clock
from modernbert_train.config.schema import DataConfig, OptimConfig, PhaseConfig, RunConfig, StreamConfig
from modernbert_train.data.packing import SPECIAL_TOKENS, WINDOW, Chunk, GreedyPacker
from modernbert_train.data.planner import BatchPlanner
from modernbert_train.data.shuffle import ShuffledChunks

CHUNKS = 30_000  # packed for each figure; documents are repeated in another order to reach this number
ROUNDS = 5
FIRST = 200
MANY = 400_000  # documents of a set that fits no cache
SHARES = {1: (1.0,), 3: (0.6, 0.3, 0.1), 10: (0.1,) * 10}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lengths", nargs="*", type=Path, help="files of documents' lengths in tokens")
    parser.add_argument("--languages", type=int, help="plan for so many streams, from large to small, only")
    options = parser.parse_args()
    if options.languages:
        return languages(options.languages)
    files = options.lengths
    synthetic = np.clip(np.random.default_rng(0).lognormal(5.8, 0.9, 20_000), 5, 20_000).astype(np.uint32)
    sets = {file.stem if file.stem != "lengths" else str(file): np.load(file) for file in files}
    if len(sets) > 1:
        sets["together"] = np.concatenate(list(sets.values()))
    print(f"{'share of the rows that is text':34} {'1,024':>8} {'best fit':>9} {'8,192':>8} {'best fit':>9}")
    for name, lengths in (sets or {"log-normal": synthetic}).items():
        fills = [fill(lengths, row) for row in (1024, 8192)]
        print(f"{name[-34:]:34} " + " ".join(f"{ours:8.2%} {fitted:9.2%}" for ours, fitted in fills))
    if not sets:
        many = np.clip(np.random.default_rng(0).lognormal(6.2, 1.1, MANY), 5, 20_000).astype(np.uint32)
        planned = {"20,000 documents": synthetic, f"{MANY:,}": many, f"{MANY:,} of 60": np.full(MANY, 60, np.uint32)}
        for name, lengths in planned.items():
            for row_tokens in (1024, 8192):
                for number in SHARES:
                    each = [planned_per_second(lengths, row_tokens, number) for _ in range(ROUNDS)]
                    first, whole = (max(column) / 1e6 for column in zip(*each, strict=True))
                    case = f"planner, {name}, rows of {row_tokens:,}, {number:2} stream(s)"
                    print(f"{case:60} {whole:5.0f} M tokens a CPU second, {first:5.0f} in the first {FIRST} batches")


def fill(lengths: NDArray[np.integer], row_tokens: int) -> tuple[float, float]:
    """Return the share of the rows that is not padding, by our packer and by best fit, without waiting chunks."""
    order = ShuffledChunks([len(lengths)], lengths, 1, seed=17)
    chunks: list[Chunk] = []
    while len(chunks) < CHUNKS:
        chunks += [Chunk(0, *chunk) for chunk in order.block(len(chunks), 0, row_tokens - SPECIAL_TOKENS).tolist()]
    packer = GreedyPacker(row_tokens, WINDOW, DataConfig().max_wait_rows)
    for chunk in chunks:
        packer.place(chunk)
    used = sum(chunk.length + SPECIAL_TOKENS for row in packer.ready for chunk in row)
    return used / (len(packer.ready) * row_tokens), best_fit([chunk.length for chunk in chunks], row_tokens)


def best_fit(lengths: Sequence[int], row_tokens: int, open_rows: int = 64) -> float:
    rooms: list[int] = []
    spaces: list[int] = []  # empty at the end of each closed row
    for length in lengths:
        need = length + SPECIAL_TOKENS
        at = bisect_left(rooms, need)
        if at == len(rooms) and len(rooms) == open_rows:
            spaces.append(rooms.pop(0))
        room = (rooms.pop(at) if at < len(rooms) else row_tokens) - need
        if room <= SPECIAL_TOKENS:
            spaces.append(room)
        else:
            insort(rooms, room)
    return 1 - sum(spaces) / (len(spaces) * row_tokens)


def languages(number: int) -> None:
    """Plan streams of 2 million documents down to 50, the n-th with 1 / n^1.1 of the first; ModernBERT-base steps."""
    draw = np.random.default_rng(1)
    orders = {}
    for index in range(number):
        lengths = np.maximum(8, draw.lognormal(5.7, 0.8, max(50, int(2e6 / (index + 1) ** 1.1)))).astype(np.uint32)
        shards = np.diff(np.append(np.arange(0, len(lengths), 2000), len(lengths)))
        orders[f"l{index:04}"] = ShuffledChunks(shards, lengths, 16, seed=index)
    phase = PhaseConfig(tokens=1 << 60, row_tokens=1024, batch_rows=4608, microbatch_tokens=98_304)
    for alpha in (0.7, 0.5, 0.3):
        data = DataConfig(streams={name: StreamConfig(path="") for name in orders}, tokenizer="", alpha=alpha)
        optim = OptimConfig(name="none", lr=1.0)
        before, started = memory_bytes(), time.process_time()
        run = RunConfig(name="benchmark", data=data, optim=optim, phases={"only": phase})
        planner = BatchPlanner(data, Clock.of(run), orders)
        next(planner)
        first = time.process_time() - started
        tokens, started = 0, time.process_time()
        for plan in islice(planner, 40):
            tokens += plan.tokens
        rate = tokens / (time.process_time() - started) / 1e6
        state = len(json.dumps(planner.state_dict())) / 1e3
        print(
            f"{number:,} streams, alpha {alpha}: {rate:4.0f} M tokens a CPU second, first batch after {first:.2f} s, "
            f"{(memory_bytes() - before) / 1e6:.0f} MB more, {state:.0f} kB of state"
        )


def memory_bytes() -> int:
    """Return the memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def planned_per_second(lengths: NDArray[np.integer], row_tokens: int, streams: int) -> tuple[float, float]:
    """Return tokens a CPU second over the first batches, which include shuffling all documents, and over a pass."""
    planner = planner_of(lengths, row_tokens, streams)
    started = time.process_time()  # excludes other work on the machine; this process has one thread
    tokens = sum(batch.tokens for batch in islice(planner, FIRST))
    first = tokens / (time.process_time() - started)
    num_batches = max(
        0, int(lengths.sum()) * streams // 98_304 - FIRST
    )  # of a pass; the first batches may be more than one
    tokens += sum(batch.tokens for batch in islice(planner, num_batches))
    return first, tokens / (time.process_time() - started)


def planner_of(lengths: NDArray[np.integer], row_tokens: int, streams: int) -> BatchPlanner:
    """Return a planner of batches of 98,304 tokens, without an end, from several streams of equal documents."""
    names = [f"s{index}" for index in range(streams)]
    shares = dict(zip(names, SHARES[streams], strict=True))
    rows = 98_304 // row_tokens
    phase = PhaseConfig(tokens=1 << 60, row_tokens=row_tokens, batch_rows=rows, microbatch_tokens=98_304)
    asked = {name: StreamConfig(path="", proportion=share) for name, share in shares.items()}
    config = RunConfig(
        name="benchmark",
        data=DataConfig(streams=asked, tokenizer=""),
        optim=OptimConfig(name="none", lr=1.0),
        phases={"only": phase},
    )
    order = {name: ShuffledChunks([len(lengths)], lengths, 1, seed) for seed, name in enumerate(names)}
    return BatchPlanner(config.data, Clock.of(config), order)


if __name__ == "__main__":
    main()
