"""The generator's input and the sampling. If this breaks, masks or draws depend on how a batch was cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from modernbert_train.batch import IGNORED_LABEL, Inputs, PackedText
from modernbert_train.config.schema import ReplacedTokensConfig
from modernbert_train.objectives.rtd import DRAWS, TOKENS, ReplacedTokens
from tests.support.mlm_lines import MASK, PAD, VOCABULARY, text_of

LENGTHS = [1, 3, 400, 17, 60, 2, 90]


def make(text: PackedText, **settings: Any) -> Inputs:
    config = ReplacedTokensConfig(**settings)
    return ReplacedTokens(config, VOCABULARY).make(text, config)


def test_the_generator_reads_masks_and_the_text_itself() -> None:
    """85 % [MASK], the rest as it is, nothing random; positions of the text only, each once."""
    text = text_of([500] * 40)
    inputs = make(text)
    count = inputs.counts["mlm"]
    positions, labels = inputs.targets["positions_M"][:count], inputs.targets["labels_M"][:count]
    assert count == pytest.approx(0.15 * 20_000, rel=0.01) and len(set(positions)) == count
    assert (labels == text.ids_T[positions]).all() and labels.min() >= 5
    read = inputs.ids_T[positions]
    assert ((read == MASK) | (read == labels)).all()
    assert (read == MASK).mean() == pytest.approx(0.85, abs=0.03)
    assert (np.delete(inputs.ids_T, positions) == np.delete(text.ids_T, positions)).all()
    assert (inputs.targets["labels_M"][count:] == IGNORED_LABEL).all()


def test_every_token_but_pads_is_judged() -> None:
    """[CLS] and [SEP] too, as ELECTRA does; the count is known before anything is computed."""
    text = text_of(LENGTHS, tail=9)
    inputs = make(text)
    assert inputs.counts["rtd"] == sum(LENGTHS) + 2 * len(LENGTHS) == inputs.targets[TOKENS].sum()
    assert (inputs.targets[TOKENS] == (text.ids_T != PAD)).all()


def test_draws_are_uniform_and_fit_32_bits() -> None:
    """And have nothing to do with the draws of the masks, which are low where a token is chosen."""
    draws = make(text_of([500] * 40)).targets[DRAWS][:2900]
    assert draws.min() >= 0 and draws.max() < 1 << 31 and len(set(draws)) > 2890
    shares = np.histogram(draws, bins=10, range=(0, 1 << 31))[0] / len(draws)
    assert abs(shares - 0.1).max() < 0.03
