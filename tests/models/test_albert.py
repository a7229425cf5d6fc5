"""Layers of ALBERT that share weights: the right ones do, and all else is unchanged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from modernbert_train.batch import Batch
from modernbert_train.config.albert import AlbertConfig
from modernbert_train.models.albert import AlbertForMaskedLM, Attention, FeedForward
from tests.support.attention import WAYS
from tests.support.encoders import ALBERT, build

Make = Callable[..., Any]
GROUPS, INNER, BOTH = (WAYS[way] for way in ("groups", "turns", "groups and turns"))


@pytest.mark.parametrize(
    ("config", "attention", "ffn"),
    [
        (ALBERT, (0, 0, 0, 0), (0, 0, 0, 0)),
        (GROUPS, (0, 0, 1, 1), (0, 0, 1, 1)),
        (INNER, (0, 1, 0, 1), (0, 1, 0, 1)),
        (BOTH, (0, 1, 0, 1, 2, 3, 2, 3), (0, 1, 0, 1, 2, 3, 2, 3)),
        (replace(ALBERT, sharing="attention"), (0, 0, 0, 0), (0, 1, 2, 3)),
        (replace(ALBERT, sharing="ffn", groups=2), (0, 1, 2, 3), (0, 0, 1, 1)),
        (replace(ALBERT, sharing="none"), (0, 1, 2, 3), (0, 1, 2, 3)),
    ],
)
def test_which_layers_share_by_hand(config: AlbertConfig, attention: tuple[int, ...], ffn: tuple[int, ...]) -> None:
    assert (config.weights_of("attention"), config.weights_of("ffn")) == (attention, ffn)
    with torch.device("meta"):
        units = AlbertForMaskedLM(config).model.layers
    kinds = [type(unit) for unit in units]
    assert kinds == [Attention] * (max(attention) + 1) + [FeedForward] * (max(ffn) + 1)
    assert len(config.unit_passes) == len(units) and sum(config.unit_passes) == 2 * config.num_layers


def passes_of(model: AlbertForMaskedLM, batch: Batch) -> list[Tensor]:
    """Return the dropout masks of each pass through the shared attention: its dropout gets ones as input."""
    dropped: list[Tensor] = []
    unit = model.model.layers[0]
    assert isinstance(unit, Attention)
    plain = unit.dropout.forward
    unit.dropout.forward = lambda x: dropped.append(plain(torch.ones_like(x)) == 0) or plain(x)  # type: ignore[method-assign, func-returns-value]
    model.encode(batch.packed)
    return dropped


def test_every_pass_through_a_shared_layer_drops_other_numbers(sequences: Make, pack: Make) -> None:
    """The same numbers in all layers would be another regularisation. They follow from the generator alone, which a
    step keys by (seed, step, microbatch)."""
    batch = pack([sequences([50])], row_tokens=50)
    runs = []
    for _ in range(2):
        model = build(replace(ALBERT, dropout=0.5)).train()
        torch.manual_seed(7)
        runs.append(passes_of(model, batch))
    assert len(runs[0]) == ALBERT.num_layers
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)
    for first in range(ALBERT.num_layers):
        for second in range(first):
            alike = (runs[0][first] == runs[0][second]).float().mean().item()
            assert alike == pytest.approx(0.5, abs=0.05)
