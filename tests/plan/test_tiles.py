"""Tiles that attention's kernels compute, compared with a count of the tiles that a mask touches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from modernbert_train.config.objective import Order
from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.plan.attended_keys import TILE, mean_tiles, mixed
from modernbert_train.plan.census import census


def touched(tokens: int, window: int | None, order: Order) -> int:
    """Return the keys computed for all queries of a sequence: pairs in tiles with at least one visible pair."""
    query, key = np.ogrid[:tokens, :tokens]
    seen = np.ones((tokens, tokens), dtype=bool)
    if order == "causal":
        seen &= (key <= query) & ((window is None) | (query - key < (window or 0)))
    elif window is not None:
        seen &= abs(query - key) <= window
    edges = np.arange(0, tokens, TILE)
    return TILE * TILE * int(np.add.reduceat(np.add.reduceat(seen, edges, 0), edges, 1).astype(bool).sum())


@pytest.mark.parametrize("order", ["all", "causal"])
@pytest.mark.parametrize("window", [None, 1, 64, 128, 129, 200])
def test_keys_are_those_of_the_tiles_that_the_mask_touches(window: int | None, order: Order) -> None:
    lengths = [1, 100, 128, 129, 500, 1024]
    model = replace(census(ModernBertConfig()), windows=(None, window))
    found = mean_tiles(lengths, model, order)
    wholes, windows = ([touched(n, each, order) for n in lengths] for each in (None, window))
    assert found.whole == pytest.approx(sum(wholes) / sum(lengths))
    assert found.local == pytest.approx(0 if window is None else sum(windows) / sum(lengths))


def test_one_long_sequence_makes_the_grid_of_a_mixture() -> None:
    model = census(ModernBertConfig())
    parts = {"short": mean_tiles([100] * 20, model), "long": mean_tiles([1000], model)}
    both = mixed(parts, {"short": 0.5, "long": 0.5})
    assert both.longest == 8 and both.blocks == pytest.approx((1 / 100 + 8 / 1000) / 2)
    sequence_tokens = 1 / (0.5 / 100 + 0.5 / 1000)
    assert both.empty(sequence_tokens) == pytest.approx((7 * 10 + 0 * 1) / 2000)  # ten short sequences and a long one
