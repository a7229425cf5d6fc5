"""Round numbers for the axes of charts."""

from __future__ import annotations

import math


def round_step(rough: float) -> float:
    """The smallest of 1, 2, 2.5 and 5 times a power of ten that is not below a number above 0."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1.0, 2.0, 2.5, 5.0, 10.0) if m * power >= rough * 0.999)


def log_ticks(low: float, high: float) -> list[float]:
    """Round values in a range of exponents: powers of ten, digits between them when few, even steps when very few."""
    if high - low < 0.3:
        step = round_step((10.0**high - 10.0**low) / 5)
        return [i * step for i in range(math.ceil(10.0**low / step), int(10.0**high / step) + 1)]
    decades = range(math.floor(low), math.ceil(high) + 1)
    digits = (1,) if high - low > 3 else (1, 2, 5) if high - low > 1.2 else (1, 1.5, 2, 3, 4, 6, 8)
    return [d * 10.0**e for e in decades for d in digits if low <= math.log10(d * 10.0**e) <= high]
