"""Masking: how many tokens, which ones, and their replacements.

If this breaks, the model learns to predict [SEP], the loss divides by a wrong number, or resuming changes the masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from modernbert_train.batch import WEIGHT_UNIT
from modernbert_train.config.schema import MaskedLmConfig
from modernbert_train.objectives.mlm import Masked, MaskedLM, predictions
from tests.support.mlm_lines import VOCABULARY, keys, line, text_of


def corrupt(lengths: Sequence[int], rate: float, config: MaskedLmConfig | None = None, tail: int = 0) -> Masked:
    return MaskedLM(config or MaskedLmConfig(), VOCABULARY).corrupt(*line(lengths, tail), keys(len(lengths)), rate)


def counts_of(positions_M: NDArray[np.int64], lengths: Sequence[int]) -> NDArray[np.int64]:
    """Return the predicted tokens of each sequence, none of which is special."""
    sequence_T = np.repeat(np.arange(len(lengths)), np.array(lengths) + 2)
    return np.bincount(sequence_T[positions_M], minlength=len(lengths))


@pytest.mark.runs
@example([10, 100, 30], 0.3)
@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 80), min_size=1, max_size=20), st.floats(0.01, 1.0))
def test_each_sequence_has_its_share_rounded_up_or_down(lengths: list[int], rate: float) -> None:
    counts = counts_of(corrupt(lengths, rate).positions_M, lengths)
    assert (np.abs(counts - rate * np.array(lengths)) < 1).all()


def test_rounding_is_fair_so_short_sequences_are_predicted_too() -> None:
    """Of 4,000 sequences of one token 30 % are predicted (sigma 29); of five tokens, one and a half each (sigma 32)."""
    assert abs(len(corrupt([1] * 4000, 0.3).positions_M) - 1200) < 120
    assert abs(len(corrupt([5] * 4000, 0.3).positions_M) - 6000) < 130


def test_labels_are_the_originals_and_everything_else_stays() -> None:
    lengths = [40, 3, 1, 200, 17]
    ids, *_ = line(lengths, tail=9)
    before = ids.copy()
    masked = corrupt(lengths, 0.3, tail=9)
    assert (ids == before).all()
    assert (masked.labels_M == ids[masked.positions_M]).all()
    assert (np.diff(masked.positions_M) > 0).all()
    unselected = np.setdiff1d(np.arange(len(ids)), masked.positions_M)
    assert (masked.input_ids_T[unselected] == ids[unselected]).all()
    assert masked.input_ids_T.dtype == masked.positions_M.dtype == masked.labels_M.dtype == np.int64


@pytest.mark.parametrize("rate", [0.15, 0.3])
def test_the_bound_holds_for_thousands_of_the_shortest_sequences(rate: float, caplog: pytest.LogCaptureFixture) -> None:
    """One token each: all of them lucky would pass the bound, and their fair rounding keeps them far from it.
    Predictions beyond it would be left out, with a warning."""
    objective = MaskedLM(MaskedLmConfig(), VOCABULARY)
    for number in (1, 10, 100, 2000):
        for first in range(0, 5000, 250):
            objective.corrupt(*line([1] * number), keys(number, first), rate)
    assert not caplog.text


def test_predictions_may_stand_one_before() -> None:
    """Never in another sequence: a special token precedes each text."""
    text = text_of([5, 1, 20])
    config = MaskedLmConfig(mask_rate=1.0)
    here, before = (
        MaskedLM(config, VOCABULARY).make(text, replace(config, predict_from=where)) for where in ("itself", "before")
    )
    assert np.array_equal(here.ids_T, before.ids_T)
    assert np.array_equal(here.targets["labels_M"], before.targets["labels_M"])
    assert np.array_equal(here.targets["positions_M"][:26] - 1, before.targets["positions_M"][:26])
    assert {*before.targets["positions_M"][:26].tolist()} >= {0, 7, 10}


def test_each_sequence_may_have_a_rate_of_its_own() -> None:
    """Uniform between the ends, keyed by the sequence alone, within the bound that shapes follow."""
    text = text_of([400] * 300)
    config = MaskedLmConfig(mask_rate=0.4, mask_spread=0.3)
    objective = MaskedLM(config, VOCABULARY)
    made = objective.make(text, config)
    shares = counts_of(made.targets["positions_M"][: made.counts["mlm"]], [400] * 300) / 400
    assert 0.1 <= shares.min() < 0.12 and 0.68 < shares.max() <= 0.7025 and abs(shares.mean() - 0.4) < 0.03
    assert np.histogram(shares, bins=6, range=(0.1, 0.7))[0].min() > 30
    assert len(made.targets["positions_M"]) == objective.max_predicted(0.7, len(text.ids_T))


@pytest.mark.parametrize("masking", ["exact", "bernoulli", "reference"])
def test_a_prediction_may_weigh_one_over_the_rate_of_its_sequence(masking: str) -> None:
    """Masked diffusion: rates between 0 and 1, and a term that counts the text, so that no draw moves its divisor."""
    sizes = [400, 1, 30, 80] * 100
    text = text_of(sizes, tail=9)
    config = MaskedLmConfig(mask_rate=0.5, mask_spread=0.5, mask_weight="1/rate", masking=masking)  # type: ignore[arg-type]
    made = MaskedLM(config, VOCABULARY).make(text, config)
    even = replace(config, mask_weight="none")
    plain = MaskedLM(even, VOCABULARY).make(text, even)
    special = 2 * 400 if masking == "reference" else 0
    assert made.counts["mlm"] == sum(sizes) + special and predictions(made) == plain.counts["mlm"]
    number = predictions(made)
    weights, at = made.targets["weights_M"] / WEIGHT_UNIT, made.targets["positions_M"]
    assert weights[:number].min() >= 1 and weights.max() <= 1000 and not weights[number:].any()
    assert made.targets["weights_M"].max() < 2**31 and len(weights) == len(at)
    whole = 0.0  # of each sequence: its predictions over its rate are its tokens, as far as whole numbers can be
    for start, length in zip(text.starts_Q.tolist(), sizes, strict=True):
        own = (at[:number] >= start - 1) & (at[:number] <= start + length)
        if own.any():
            (weight,) = {*weights[:number][own].tolist()}
            whole += own.sum() * weight
            if masking == "exact":
                assert abs(own.sum() * weight - length) <= weight * (1 + 1e-5)
    assert abs(whole / made.counts["mlm"] - 1) < 0.05
    assert config.for_validation().mask_weight == "none" and config.for_validation().mask_spread == 0


def test_no_prediction_outweighs_a_batch() -> None:
    """A rate near 0 is raised to one in a thousand, as LLaDA's code has it: a weight of a million would be a step."""
    config = MaskedLmConfig(mask_rate=0.0005, mask_spread=0.0005, mask_weight="1/rate")
    made = MaskedLM(config, VOCABULARY).make(text_of([4000, 3000]), config)
    assert predictions(made) == 7
    assert (made.targets["weights_M"][:7] == 1000 * WEIGHT_UNIT).all()


@pytest.mark.parametrize(("curve", "rates"), [("linear", (0.3, 0.225, 0.15)), ("cosine", (0.3, 0.278033, 0.171967))])
def test_the_rate_may_move_through_a_phase(curve: str, rates: tuple[float, ...]) -> None:
    """The bound stays, or every batch would be recompiled."""
    config = MaskedLmConfig(mask_rate=0.3, mask_rate_end=0.15, mask_curve=curve)  # type: ignore[arg-type]
    moments = [config.at(done) for done in ((0, 0.5, 1) if curve == "linear" else (0, 0.25 + 1e-12, 0.75))]
    assert tuple(each.mask_rate for each in moments) == rates
    assert {each.max_predicted_share for each in (config, *moments)} == {0.3}
    assert config.predicted_share == pytest.approx(0.225)
    rising = MaskedLmConfig(mask_rate=0.1, mask_rate_end=0.4)
    assert (rising.at(0.5).mask_rate, rising.at(0.5).max_predicted_share) == (0.25, 0.4)


def test_the_rate_of_a_sequence_and_its_rounding_are_drawn_apart() -> None:
    """From one draw a text of one token would be predicted at high rates alone, and weigh 0.69 of its due."""
    config = MaskedLmConfig(mask_rate=0.5, mask_spread=0.5, mask_weight="1/rate")
    made = MaskedLM(config, VOCABULARY).make(text_of([1] * 20_000), config)
    assert made.targets["weights_M"].sum() / WEIGHT_UNIT / 20_000 == pytest.approx(1, abs=0.1)
