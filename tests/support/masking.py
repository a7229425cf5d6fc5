"""Statistics of masks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from modernbert_train.core.keyed_random import derive, derive_each

PAD, UNK, CLS, SEP, MASK = range(5)
Line = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


def keys(numbers: Sequence[int] | NDArray[np.int64]) -> NDArray[np.uint64]:
    return derive_each(derive(17, 3), np.asarray(numbers, np.int64))


def five_sigma(share: float, number: int) -> float:
    return 5 * math.sqrt(share * (1 - share) / number)


def chi_square(counts: NDArray[np.integer], expected: NDArray[np.float64] | float) -> float:
    """Return the excess over the expectation, in sigmas."""
    degrees = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees))
