"""The generator's input and the sampling. If this breaks, masks or draws depend on how a batch was cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from modernbert_train.batch import IGNORED_LABEL, Inputs, PackedText
from modernbert_train.config.schema import ReplacedTokensConfig
from modernbert_train.objectives.rtd import DRAWS, TOKENS, ReplacedTokens
from tests.support.mlm_lines import CLS, MASK, PAD, SEP, VOCABULARY, keys

LENGTHS = [1, 3, 400, 17, 60, 2, 90]


def text_of(lengths: list[int], tail: int = 0, first_key: int = 0) -> PackedText:
    draw = np.random.default_rng(first_key)
    ids: list[int] = []
    starts = []
    for length in lengths:
        starts.append(len(ids) + 1)
        ids += [CLS, *draw.integers(10, 100, length).tolist(), SEP]
    packed = np.array(ids + [PAD] * tail, np.int64)
    return PackedText(packed, np.array(starts), np.array(lengths), keys(len(lengths), first_key))


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
    assert (labels == text.ids_T[positions]).all() and labels.min() >= 10
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


@pytest.mark.parametrize("masking", ["exact", "bernoulli"])
def test_draws_belong_to_the_text_wherever_it_stands(masking: str) -> None:
    """The same sequence alone, and after others: masks, labels and draws are the same."""
    whole = text_of(LENGTHS)
    inputs = make(whole, masking=masking)
    count = inputs.counts["mlm"]
    together = {
        position: (inputs.ids_T[position], inputs.targets["labels_M"][at], inputs.targets[DRAWS][at])
        for at, position in enumerate(inputs.targets["positions_M"][:count].tolist())
    }
    found = 0
    for number, (start, length) in enumerate(zip(whole.starts_Q.tolist(), LENGTHS, strict=True)):
        own = PackedText(
            whole.ids_T[start - 1 : start + length + 1].copy(), np.array([1]), np.array([length]),
            whole.keys_Q[number : number + 1],
        )  # fmt: skip
        alone = make(own, masking=masking)
        for at in range(alone.counts["mlm"]):
            position = int(alone.targets["positions_M"][at])
            same = (alone.ids_T[position], alone.targets["labels_M"][at], alone.targets[DRAWS][at])
            assert together[start - 1 + position] == same
            found += 1
    assert found == count > 50


def test_shapes_are_static() -> None:
    """Or a compiled model compiles again."""
    texts = [text_of(lengths, 600 - sum(lengths) - 2 * len(lengths)) for lengths in ([500], [1] * 100, [30] * 10)]
    shapes = [{name: values.shape for name, values in make(text).targets.items()} for text in texts]
    assert shapes[0] == shapes[1] == shapes[2]
