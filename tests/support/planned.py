"""Run a planner, and read its batches and the chunks that wait in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from modernbert_train.config.schema import (
    BatchWarmupConfig,
    DataConfig,
    PhaseConfig,
    PhaseStreamConfig,
    RunConfig,
    StableAdamWConfig,
)
from modernbert_train.data.packing import Chunk
from modernbert_train.data.planner import BatchPlan


def run(*row_tokens: int, tokens: int = 1500, shares: Sequence[Mapping[str, float]] = ({},), **data: Any) -> RunConfig:
    """A run with one phase for each row length, with these shares of the streams; the first has a growing batch."""
    phases = {}
    for index, row in enumerate(row_tokens):
        asked = shares[index % len(shares)]
        phases[f"p{index}"] = PhaseConfig(
            tokens=tokens,
            row_tokens=row,
            batch_rows=4,
            microbatch_tokens=2 * row,
            batch_warmup=BatchWarmupConfig(start_rows=1, step_rows=2, tokens=tokens // 2) if index == 0 else None,
            streams={name: PhaseStreamConfig(proportion=each / sum(asked.values())) for name, each in asked.items()},
        )
    settings = {"packing_window": 5, "max_wait_rows": 6, "shuffle_block_shards": 2, **data}
    train = None if "streams" in data else "train"
    return RunConfig(
        name="t",
        data=DataConfig(**{"train": train, "tokenizer": "tokenizer", **settings}),
        optim=StableAdamWConfig(lr=1e-3),
        phases=phases,
    )


def chunks_of(plans: Iterable[BatchPlan]) -> list[Chunk]:
    return [chunk for plan in plans for row in plan.rows for chunk in row]


def waiting(state: dict[str, Any]) -> list[Chunk]:
    """Chunks that the packer holds but has not given out."""
    packer = state["packer"]
    chunks = [chunk for row in packer["ready"] for chunk in row] + [chunk for _, chunk in packer["waiting"]]
    return [Chunk(*chunk) for chunk in chunks]
