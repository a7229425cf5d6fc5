"""Hours and dollars of a run on a kind of GPU, as a range; and bytes of disk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from modernbert_train.plan.gpus import GPUS
from modernbert_train.plan.make import Plan
from modernbert_train.plan.memory import checkpoint_bytes


@dataclass(frozen=True)
class Bill:
    """Cost of a run on one kind of GPU; pairs are (lowest, highest), see `Pace` of speed.py.

    Attributes:
        tokens_per_second: of one GPU, in training.
        mfu: share of the datasheet's FLOPs that training then uses.
        seconds: expected time of training and validation.
        between: lowest and highest `seconds`.
        ranks: GPUs.
        price: dollars an hour for one GPU.
        fits: True if every phase fits as configured; None if memory is not predicted.
    """

    tokens_per_second: tuple[float, float]
    mfu: tuple[float, float]
    seconds: float
    between: tuple[float, float]
    ranks: int
    price: float
    fits: bool | None

    @property
    def gpu_hours(self) -> tuple[float, float]:
        low, high = self.between
        return self.ranks * low / 3600, self.ranks * high / 3600

    @property
    def dollars(self) -> tuple[float, float]:
        low, high = self.gpu_hours
        return low * self.price, high * self.price


def bill_of(plan: Plan, gpu: str, prices: dict[str, float]) -> Bill:
    """Compute time and cost.

    Args:
        plan: the run.
        gpu: key of GPUS.
        prices: dollars an hour for one GPU, replacing the assumed ones.
    """
    training = sum((plan.phase_times(gpu, phase) for phase in plan.phases), np.zeros(3))
    flops = sum(phase.tokens * phase.flops.training for phase in plan.phases)
    fastest, _, slowest = (float(plan.tokens / each / plan.ranks) for each in training)
    low, expected, high = (float(each) for each in training + plan.validation_times(gpu))
    share = flops / plan.tokens / GPUS[gpu].peak_flops
    return Bill(
        tokens_per_second=(slowest, fastest),
        mfu=(slowest * share, fastest * share),
        seconds=expected,
        between=(low, high),
        ranks=plan.ranks,
        price=prices.get(gpu, GPUS[gpu].price),
        fits=all(plan.fits(phase, gpu) for phase in plan.phases) if plan.knows_memory else None,
    )


@dataclass(frozen=True)
class Stored:
    """Checkpoints of a run.

    Attributes:
        checkpoint_bytes: size of one.
        written: approximate number over the whole run.
        kept: maximum number at the same time.
    """

    checkpoint_bytes: int
    written: int
    kept: int

    @property
    def kept_bytes(self) -> int:
        return self.kept * self.checkpoint_bytes

    @property
    def max_bytes(self) -> int:
        """Bytes on disk while one more is being written."""
        return (self.kept + 1) * self.checkpoint_bytes


def stored(plan: Plan, gpu: str) -> Stored:
    """Count the checkpoints; how many are written by time depends on the GPU."""
    settings = plan.config.checkpoint
    seconds = sum(plan.phase_seconds(gpu, phase) for phase in plan.phases)
    timed = int(seconds // settings.interval_seconds) if settings.interval_seconds is not None else 0
    stepped = plan.steps // settings.interval_steps if settings.interval_steps is not None else 0
    written = len(plan.phases) + timed + stepped + plan.milestones
    kept = min(written, settings.keep + len(plan.phases) - 1 + plan.milestones)
    config = plan.config
    return Stored(checkpoint_bytes(config.model, config.objective, config.optim), written, kept)
