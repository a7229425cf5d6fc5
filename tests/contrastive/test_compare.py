"""Which texts count as wrong, worked by hand.

If this breaks, a model learns that a text does not answer its own query.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from modernbert_train.config.schema import ContrastiveConfig
from modernbert_train.models.build import build_model
from modernbert_train.models.contrastive import Compared, ForVectors, Texts, compare
from modernbert_train.models.init import initialize
from modernbert_train.optim.groups import weights_of
from tests.support.contrastive_models import SIZE

PLAIN = ContrastiveConfig(temperature=1.0)
# queries a and b of the plane, their positives, a negative of a
VECTORS_ND = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0], [1.0, 1.0], [0.0, -1.0]])
ROLES_N = torch.tensor([0, 0, 1, 1, 2])
SIDE = math.sqrt(0.5)


def found(hashes: list[int], settings: ContrastiveConfig = PLAIN, own: slice = slice(0, 5)) -> Compared:
    return compare(
        VECTORS_ND, Texts(ROLES_N, torch.tensor(hashes), torch.ones(5, dtype=torch.int64)), own, settings, backward=True
    )


def nll(right: float, *wrong: float) -> float:
    return math.log(sum(math.exp(each - right) for each in (right, *wrong)))


def test_a_query_is_distinguished_from_all_positives_and_negatives() -> None:
    compared = found([1, 2, 3, 4, 5])
    assert compared.losses_Q.tolist() == pytest.approx([nll(1.0, SIDE, 0.0), nll(SIDE, 0.0, -1.0)], abs=1e-6)
    assert int(compared.hits) == 2
    assert found([1, 2, 3, 4, 5], own=slice(1, 4)).losses_Q.tolist() == compared.losses_Q[1:].tolist()


@pytest.mark.parametrize(
    ("hashes", "there", "back"),
    [
        ([1, 2, 3, 3, 5], [nll(1.0, 0.0), nll(SIDE, -1.0)], [nll(1.0), nll(SIDE)]),  # both have the same positive
        ([1, 1, 3, 4, 5], [nll(1.0, 0.0), nll(SIDE, -1.0)], [nll(1.0), nll(SIDE)]),  # both queries are the same text
        # the negative of a is the positive of b
        ([1, 2, 3, 4, 4], [nll(1.0, SIDE, 0.0), nll(SIDE, 0.0)], [nll(1.0, 0.0), nll(SIDE, SIDE)]),
        # the positive of b is the query a itself
        ([1, 2, 3, 1, 5], [nll(1.0, 0.0), nll(SIDE, 0.0, -1.0)], [nll(1.0, 0.0), nll(SIDE)]),
        # the positive of a is the query b
        ([1, 3, 3, 4, 5], [nll(1.0, SIDE, 0.0), nll(SIDE, -1.0)], [nll(1.0), nll(SIDE, SIDE)]),
    ],
)
def test_equal_texts_are_not_wrong(hashes: list[int], there: list[float], back: list[float]) -> None:
    """In the other direction, from a positive back to its query, another query that is the same text, or has that
    positive, is left out."""
    compared = found(hashes)
    assert compared.losses_Q.tolist() == pytest.approx(there, abs=1e-6)
    assert compared.gradient_VW is not None and torch.isfinite(compared.gradient_VW).all()
    both = found(hashes, replace(PLAIN, symmetric=True)).losses_Q.tolist()
    assert both == pytest.approx([(a + b) / 2 for a, b in zip(there, back, strict=True)], abs=1e-6)


def test_a_margin_leaves_out_what_is_nearer_than_the_positive() -> None:
    """For b the positive of a is 0.71 less near than its own, and is left out by a margin of -0.8 alone."""
    for margin, losses in (
        (0.0, [nll(1.0, SIDE, 0.0), nll(SIDE, 0.0, -1.0)]),
        (-0.8, [nll(1.0, 0.0), nll(SIDE, -1.0)]),
    ):
        settings = replace(PLAIN, margin=margin)
        assert found([1, 2, 3, 4, 5], settings).losses_Q.tolist() == pytest.approx(losses, abs=1e-6)


def test_both_directions_are_averaged() -> None:
    losses = found([1, 2, 3, 4, 5], replace(PLAIN, symmetric=True)).losses_Q.tolist()
    there = [nll(1.0, SIDE, 0.0), nll(SIDE, 0.0, -1.0)]
    back = [nll(1.0, 0.0), nll(SIDE, SIDE)]
    assert losses == pytest.approx([(a + b) / 2 for a, b in zip(there, back, strict=True)], abs=1e-6)


def test_a_learnt_temperature_stays_within_its_bounds_and_is_not_decayed() -> None:
    """As CLIP's scale, 1 to 100; after an update beyond them the parameter is brought back before the next step."""
    settings = ContrastiveConfig(temperature=0.07, learn_temperature=True)
    model = build_model(SIZE, settings)
    initialize(model, SIZE, 1)
    assert isinstance(model, ForVectors) and model.log_scale is not None
    assert model.log_scale().item() == pytest.approx(1 / 0.07)
    assert {weight.name: weight.kind for weight in weights_of(model)}["log_scale.bias"] == "vector"
    for far, scale in ((9.0, 100.0), (-9.0, 1.0)):
        torch.nn.init.constant_(model.log_scale.bias, far)
        assert model.log_scale().item() == pytest.approx(scale)
        model.set_phase(SIZE)
        assert abs(model.log_scale.bias.item()) < 3 and model.log_scale().item() == pytest.approx(scale)
