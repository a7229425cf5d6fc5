"""A run's training loss as one number: the same wherever it is told, out of the lines of metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from modernbert_train.core.read_json import number

LOSS_STEPS = 20  # a run's training loss, wherever it is told, is the mean of so many last steps


def training_loss(losses: Sequence[float]) -> float | None:
    """A run's training loss, as `train` and `report` print it: the mean of its last finite ones of `LOSS_STEPS`.

    Args:
        losses: of its steps, in order, each step once; at least the last of them.
    """
    known = [float(loss) for loss in losses[-LOSS_STEPS:] if math.isfinite(loss)]
    return mean(known) if known else None


def mean(numbers: Sequence[float]) -> float:
    """Of finite numbers, which a file may hold of any size; their sum may be beyond what a float holds."""
    try:
        return math.fsum(numbers) / len(numbers)
    except OverflowError:
        return math.fsum(each / len(numbers) for each in numbers)


def losses_of(entries: Sequence[Mapping[str, Any]]) -> list[float]:
    """The losses in lines of metrics.jsonl, in order; of a step that was done again after a restart, the last one."""
    found: list[float] = []
    earliest = math.inf
    for entry in reversed(entries):
        step, loss = number(entry.get("step")), number(entry.get("loss"))
        if entry.get("kind") == "step" and step is not None and step < earliest:
            earliest = step
            found.append(math.nan if loss is None else loss)
    return found[::-1]
