"""Compute a run's training loss as one number from the lines of metrics.jsonl, the same for all pages and verbs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from modernbert_train.core.read_json import number

LOSS_STEPS = 20  # a run's training loss is the mean of this many last steps


def training_loss(losses: Sequence[float]) -> float | None:
    """Return the mean of the finite losses among the last `LOSS_STEPS`; None without any.

    Args:
        losses: of the steps in order, each step once; at least the last ones.
    """
    finite = [float(loss) for loss in losses[-LOSS_STEPS:] if math.isfinite(loss)]
    return mean(finite) if finite else None


def mean(numbers: Sequence[float]) -> float:
    """Return the mean of finite numbers, also if their sum overflows a float: a file may hold any number."""
    try:
        return math.fsum(numbers) / len(numbers)
    except OverflowError:
        return math.fsum(each / len(numbers) for each in numbers)


def losses_of(entries: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the losses in lines of metrics.jsonl, in order; a repeated step counts once, its last time."""
    losses: list[float] = []
    earliest = math.inf
    for entry in reversed(entries):
        step, loss = number(entry.get("step")), number(entry.get("loss"))
        if entry.get("kind") == "step" and step is not None and step < earliest:
            earliest = step
            losses.append(math.nan if loss is None else loss)
    return losses[::-1]
