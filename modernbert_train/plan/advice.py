"""Find the largest microbatch that fits a GPU, and the sharding with the fastest step."""

from __future__ import annotations

from dataclasses import dataclass

from modernbert_train.plan import memory_fit
from modernbert_train.plan.gpus import GPUS
from modernbert_train.plan.make import Plan, PlannedPhase
from modernbert_train.plan.memory import Memory, Strategy, sharing_ranks
from modernbert_train.plan.speed import StepTime

STRATEGIES: tuple[Strategy, ...] = ("ddp", "fsdp2", "hsdp")
SHARDING_GAIN = 1.02  # weights that fit unsharded are sharded only for a larger gain


@dataclass(frozen=True)
class Setting:
    """A way to run a phase, with its memory and time.

    Attributes:
        strategy: how ranks share the model.
        microbatch_rows: largest number of rows that fits and divides a rank's rows.
        fitting_rows: largest number of rows that fits; the configured rows if memory is not predicted.
        microbatches: number in one step on one rank.
        memory: memory of one GPU; None if it is not predicted.
        step: time of one step.
    """

    strategy: Strategy
    microbatch_rows: int
    fitting_rows: int
    microbatches: int
    memory: Memory | None
    step: StepTime


def settings(plan: Plan, phase: PlannedPhase, gpu: str, ranks: int) -> list[Setting]:
    """Return, for each sensible strategy, the largest microbatch that fits and divides a rank's rows; best first.

    If memory is not predicted, a microbatch has at most the configured rows.

    Returns:
        Settings by step time, but sharding that gains less than 2 % ranks below ddp; empty if not even one row fits.
    """
    advised = []
    for strategy in STRATEGIES:
        shards = sharing_ranks(strategy, ranks, plan.config.distributed.shard_ranks, GPUS[gpu])
        if (strategy != "ddp" and shards == 1) or (strategy == "hsdp" and shards == ranks):
            continue  # the same as ddp, or as fsdp2
        own_rows = memory_fit.own_rows(phase.config, ranks)
        fitting = (
            memory_fit.max_rows(plan.config, phase.name, GPUS[gpu], strategy, ranks, own_rows)
            if plan.knows_memory
            else min(own_rows, phase.config.microbatch_rows)
        )
        if fitting:
            rows = max(rows for rows in range(1, fitting + 1) if own_rows % rows == 0)
            memory = None
            if plan.knows_memory:
                memory = memory_fit.phase_memory(plan.config, phase.name, GPUS[gpu], strategy, ranks, rows)
            step = plan.step(gpu, phase, phase.config.batch_rows, strategy=strategy, ranks=ranks, microbatch_rows=rows)
            num_microbatches = -(-phase.config.batch_rows // ranks // rows)
            advised.append(Setting(strategy, rows, fitting, num_microbatches, memory, step))
    return sorted(
        advised, key=lambda setting: setting.step.seconds * (1.0 if setting.strategy == "ddp" else SHARDING_GAIN)
    )
