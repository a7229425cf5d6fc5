"""Detect loss spikes: a pure function of the losses before, so that every rank decides the same.

Uses median and median absolute deviation, because spikes that were let through must not raise the bar for the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

_TO_STANDARD_DEVIATION = 1.4826  # of a normal distribution: standard deviation / median absolute deviation


def highest_normal_loss(losses: Sequence[float], deviations: float, min_rise: float) -> float:
    """Return the loss above which the next one is a spike.

    Args:
        losses: losses of the batches before, at least one, in nats.
        deviations: robust standard deviations above the median that are still normal.
        min_rise: nats above the median that are normal even if all losses were equal.

    Returns:
        median + max(min_rise, deviations * 1.4826 * median(|loss - median|)), in nats.
    """
    middle = median(losses)
    deviation = _TO_STANDARD_DEVIATION * median(abs(loss - middle) for loss in losses)
    return middle + max(min_rise, deviations * deviation)
