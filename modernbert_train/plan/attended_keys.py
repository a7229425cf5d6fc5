"""Keys that attention's kernels compute for a token: whole tiles of 128, which a sequence or a window fills partly.

FlashAttention-2 on heads of 64 processes sequences by blocks of 128 queries and 128 keys; 3 is assumed to do the same.
A local layer that sees 129 keys computes three tiles, 384. The grid has a block for each 128 places of the longest
sequence, times sequences; blocks beyond a shorter one's end are launched and do nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from modernbert_train.config.objective import Order
from modernbert_train.plan.census import Census
from modernbert_train.plan.flops import mean_spans

TILE = 128  # as in data/microbatches.py
_TOGETHER = 98_304  # tokens of the microbatch for which `longest` is estimated


@dataclass(frozen=True)
class Tiles:
    """Work of attention's kernels, means over tokens.

    Attributes:
        whole, local: keys computed for a token in global layers, and the mean over the local ones.
        blocks: blocks of queries with work, for each token.
        longest: blocks of the longest sequence of a microbatch.
    """

    whole: float
    local: float
    blocks: float
    longest: int

    def empty(self, sequence_tokens: float) -> float:
        """Return the blocks without work for each token, at this mean length of a sequence."""
        return max(0.0, self.longest / sequence_tokens - self.blocks)


def mean_tiles(
    lengths: Sequence[int] | NDArray[np.integer], model: Census, order: Order = "all", query_share: float = 0.0
) -> Tiles:
    """Count the tiles of sequences; for the arguments see `mean_spans`. A query token counts as a token."""
    n = np.asarray(lengths, dtype=np.int64)
    tiles = -(-n // TILE)
    itself = 1 if order == "causal" else 0  # a causal window includes the token itself
    reach = tuple(None if w is None else itself - (itself - max(w, itself)) // TILE for w in model.windows)
    spans = mean_spans(tiles, replace(model, windows=reach), "causal" if order == "causal" else "all")
    blocks = float(tiles.sum() / n.sum())
    keys = TILE * TILE * blocks * (1 + query_share)
    longest = np.quantile(n, max(0.0, 1 - n.mean() / _TOGETHER), method="higher")
    return Tiles(keys * spans.whole, keys * spans.local, blocks, math.ceil(longest / TILE))


def mixed(tiles_of: Mapping[str, Tiles], shares: Mapping[str, float]) -> Tiles:
    """Average the tiles of a mixture; one long sequence sets the grid for all.

    Args:
        tiles_of: tiles of each stream.
        shares: each stream's share of the tokens.
    """
    return Tiles(
        sum(shares[name] * each.whole for name, each in tiles_of.items()),
        sum(shares[name] * each.local for name, each in tiles_of.items()),
        sum(shares[name] * each.blocks for name, each in tiles_of.items()),
        max(each.longest for each in tiles_of.values()),
    )
