"""When a loss is a spike: a pure function of the losses before it, so that it decides the same on every rank.

Median and median absolute deviation, because spikes that were let through must not raise the bar for the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

_TO_STANDARD_DEVIATION = 1.4826  # of a normal distribution, over its median absolute deviation


def highest_normal_loss(losses: Sequence[float], deviations: float, min_rise: float) -> float:
    """The loss above which the next one is a spike.

    Args:
        losses: of the batches before, at least one; in nats.
        deviations: how many robust standard deviations above their median are still normal.
        min_rise: how many nats above it are normal however even the losses were.

    Returns:
        median + max(min_rise, deviations * 1.4826 * median(|loss - median|)), in nats.
    """
    middle = median(losses)
    deviation = _TO_STANDARD_DEVIATION * median(abs(loss - middle) for loss in losses)
    return middle + max(min_rise, deviations * deviation)
