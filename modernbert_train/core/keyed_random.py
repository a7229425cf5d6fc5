"""Randomness as a pure function of a key, independent of a process's history.

Every draw is an integer hash (the finaliser of SplitMix64, Steele et al. 2014) of a 64-bit key and a counter. It is
stateless, costs a few vector operations, and is the same on every machine and in every version of numpy, so a run that
is resumed, rescaled or upgraded sees the same documents under the same masks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def _mix(z: Keys) -> Keys:
    z = (z ^ (z >> np.uint64(30))) * _M1
    z = (z ^ (z >> np.uint64(27))) * _M2
    return z ^ (z >> np.uint64(31))


def hash64(keys: Keys, counters: Keys) -> Keys:
    """Return 64 uniform bits for each pair of key and counter; the arguments broadcast."""
    with np.errstate(over="ignore"):
        return _mix(keys + (counters + np.uint64(1)) * _GOLDEN)


def derive(*numbers: int) -> int:
    """Derive a 64-bit key from a sequence of non-negative integers; the order matters."""
    key: Keys = np.zeros((), dtype=np.uint64)
    for part in numbers:
        key = hash64(key, np.asarray(part & _MASK, dtype=np.uint64))
    return int(key)


def derive_each(key: int | Keys, *columns: NDArray[np.integer]) -> Keys:
    """Derive one key for each row of integer columns from `key` (one, or one for each row).

    Equals derive(parts of key..., row...).
    """
    keys: Keys = np.full(np.shape(columns[0]), key, dtype=np.uint64)
    for column in columns:
        keys = hash64(keys, column.astype(np.uint64))
    return keys


def uniform(bits: Keys) -> NDArray[np.float64]:
    """Convert 64-bit draws to floats in [0, 1)."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(size: int, key: int) -> NDArray[np.int64]:
    """Return a keyed permutation of range(size)."""
    draws = hash64(np.asarray(np.uint64(key)), np.arange(size, dtype=np.uint64))
    order = np.argsort(draws)
    ranked = draws[order]
    if (ranked[1:] == ranked[:-1]).any():  # break ties by position; 64-bit draws almost never tie
        return np.argsort(draws, kind="stable")
    return order
