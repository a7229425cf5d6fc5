"""The layout of a block of shards, compiled by numba: chunks in their keyed order, twenty nanoseconds each.

The order is `keyed_random.permutation`. Draws are hashes, so a bucket sort by a few upper bits nearly sorts them, and
the rest is a short insertion sort.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # as in keyed_random.py
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_IN_BUCKET = 2  # draws, on average
_njit: Any = njit(cache=True, nogil=True)


@_njit
def _draw(key: np.uint64, counter: int) -> np.uint64:
    """Compiled copy of `keyed_random.hash64`."""
    z = key + (np.uint64(counter) + np.uint64(1)) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _M1
    z = (z ^ (z >> np.uint64(27))) * _M2
    return z ^ (z >> np.uint64(31))


@_njit
def lay_out(documents: Ints, lengths: Ints, chunk_tokens: int, key: np.uint64) -> Ints:
    """Cut documents into chunks and order these by a key.

    Args:
        documents: their numbers.
        lengths: their tokens.
        chunk_tokens: of the longest chunk.
        key: of the order.

    Returns:
        int64 [chunks, 3]: document, first token, number of tokens.
    """
    number = 0
    for at in range(len(lengths)):
        number += (lengths[at] + chunk_tokens - 1) // chunk_tokens
    bits = 1
    while _IN_BUCKET << bits < number:
        bits += 1
    shift = np.uint64(64 - bits)
    ends = np.zeros((1 << bits) + 1, np.int32)
    draws = np.empty(number, np.uint64)
    for chunk in range(number):
        draw = _draw(key, chunk)
        draws[chunk] = draw
        ends[np.int64(draw >> shift) + 1] += 1
    for index in range(1 << bits):
        ends[index + 1] += ends[index]
    chunks, chunk = np.empty((number, 3), np.int64), 0
    in_order, sorted_draws = ends[:-1].copy(), np.empty(number, np.uint64)
    for at in range(len(lengths)):
        for start in range(0, lengths[at], chunk_tokens):
            draw = draws[chunk]
            bucket = draw >> shift
            first, index = ends[bucket], in_order[bucket]
            in_order[bucket] = index + 1
            while index > first and sorted_draws[index - 1] > draw:  # stable: equal draws keep their order
                sorted_draws[index] = sorted_draws[index - 1]
                for column in range(3):
                    chunks[index, column] = chunks[index - 1, column]
                index -= 1
            sorted_draws[index] = draw
            chunks[index, 0] = documents[at]
            chunks[index, 1] = start
            chunks[index, 2] = min(lengths[at] - start, chunk_tokens)
            chunk += 1
    return chunks
