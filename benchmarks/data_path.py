"""Tokens a second on the way from shards to batches, one process, beside Streaming's own dataset in the same run.

    python -m benchmarks.data_path                 # one minute
    python -m benchmarks.data_path --documents 2000

Documents are synthetic: log-normal lengths with a median of about 330 tokens, ids of a vocabulary of 50,000. The
planner is every rank's overhead for the whole job; reading, packing and masking is one worker's rate.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from data_prep.shards import ShardWriter
from modernbert_train.config.schema import DataConfig, ObjectiveConfig, OptimConfig, PhaseConfig, RunConfig
from modernbert_train.data.loader import MicrobatchMaker, PackedLoader
from modernbert_train.data.mds import TokenShards
from modernbert_train.data.planner import BatchPlanner
from modernbert_train.data.shuffle import ShuffledPieces
from modernbert_train.objectives.mlm import MaskedLM
from modernbert_train.vocabulary import Vocabulary

VOCAB_SIZE = 50_048
ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=20_000)
    documents = parser.parse_args().documents
    lengths = np.clip(np.random.default_rng(0).lognormal(5.8, 0.9, documents), 5, 20_000).astype(np.uint32)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "shards"
        write_shards(folder, lengths)
        cases: dict[str, Callable[[], int]] = {
            "StreamingDataset, shuffled, tokens only": lambda: read_streaming(folder),
            "TokenShards.read, shuffled, tokens only": lambda: read_tokens(folder),
            "loader: read, pack, mask, rows of 1,024": lambda: load(folder, 1024),
            "loader: read, pack, mask, rows of 8,192": lambda: load(folder, 8192),
            "planner alone, rows of 1,024": lambda: plan(lengths, 1024),
            "planner alone, rows of 8,192": lambda: plan(lengths, 8192),
        }
        rates: dict[str, list[float]] = {case: [] for case in cases}
        for _ in range(ROUNDS):  # in turns, so that a busy machine disturbs all alike
            for case, run in cases.items():
                started = time.perf_counter()
                tokens = run()
                rates[case].append(tokens / (time.perf_counter() - started))
    reference = sorted(rates["StreamingDataset, shuffled, tokens only"])[ROUNDS // 2]
    print(f"{documents:,} documents, {int(lengths.sum()):,} tokens; median of {ROUNDS} rounds")
    for case, measured in rates.items():
        rate = sorted(measured)[ROUNDS // 2]
        print(f"  {case:42} {rate / 1e6:8.2f} M tokens/s   {rate / reference:6.2f} x Streaming")
    for row_tokens in (1024, 8192):
        print(f"  packing efficiency, rows of {row_tokens:,}: {efficiency(lengths, row_tokens):.2%}")


def write_shards(folder: Path, lengths: np.ndarray) -> None:
    draw = np.random.default_rng(1)
    writer = ShardWriter(folder, VOCAB_SIZE, "0" * 64, shard_bytes=1 << 24)
    for length in lengths:
        writer.write(draw.integers(5, VOCAB_SIZE, int(length)).tolist())
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


def plans(lengths: np.ndarray, row_tokens: int, shard_documents: list[int]) -> BatchPlanner:
    return BatchPlanner(run_config(row_tokens), ShuffledPieces(shard_documents, lengths, 16, seed=17))


def one_epoch(planner: BatchPlanner) -> Iterator[tuple[int, int]]:
    """Tokens and capacity of each batch until the planner begins its second pass."""
    for batch in planner:
        if batch.epoch:
            return
        yield batch.tokens, batch.num_rows * batch.row_tokens


def plan(lengths: np.ndarray, row_tokens: int) -> int:
    return sum(tokens for tokens, _ in one_epoch(plans(lengths, row_tokens, [len(lengths)])))


def efficiency(lengths: np.ndarray, row_tokens: int) -> float:
    tokens, capacity = np.array(list(one_epoch(plans(lengths, row_tokens, [len(lengths)])))).sum(axis=0)
    return float(tokens / capacity)


def read_tokens(folder: Path) -> int:
    shards = TokenShards(folder, "tokens", VOCAB_SIZE, max_open_shards=64)
    order = np.random.default_rng(0).permutation(len(shards.lengths))
    return sum(len(shards.read(int(document))) for document in order)


def load(folder: Path, row_tokens: int) -> int:
    shards = TokenShards(folder, "tokens", VOCAB_SIZE, max_open_shards=64)
    ids = dict(pad_id=0, cls_id=2, sep_id=3, mask_id=4)
    vocabulary = Vocabulary(num_entries=VOCAB_SIZE, ordinary=np.arange(5, VOCAB_SIZE), sha256="", **ids)
    loader = PackedLoader(
        plans(shards.lengths, row_tokens, shards.shard_documents),
        MicrobatchMaker(shards, MaskedLM(ObjectiveConfig(), vocabulary), vocabulary, seed=17),
        rank=0,
        num_ranks=1,
        num_workers=0,
        prefetch_batches=1,
    )
    tokens = 0
    for batch in loader:
        if batch.plan.epoch:
            break
        tokens += batch.plan.tokens
    return tokens


def read_streaming(folder: Path) -> int:
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=str(folder), shuffle=True, batch_size=1, num_canonical_nodes=1)
    return sum(len(sample["tokens"]) for sample in dataset)


if __name__ == "__main__":
    main()
