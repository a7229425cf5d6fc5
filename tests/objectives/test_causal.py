"""Next-token targets and their positions. Off by one, and a model learns to copy its input."""

from __future__ import annotations

import numpy as np
import pytest

from modernbert_train.batch import IGNORED_LABEL, Inputs, PackedText
from modernbert_train.config.schema import CausalLmConfig
from modernbert_train.objectives.causal import CausalLM
from tests.support.mlm_lines import CLS, SEP, VOCABULARY, text_of


def make(lengths: list[int], tail: int) -> tuple[PackedText, Inputs]:
    text = text_of(lengths, tail)
    return text, CausalLM(CausalLmConfig(), VOCABULARY).make(text, CausalLmConfig())


@pytest.mark.parametrize("tail", [0, 6])
@pytest.mark.parametrize("lengths", [[1], [5, 1, 30], [7, 7]])
def test_every_token_predicts_the_next_of_its_sequence(lengths: list[int], tail: int) -> None:
    """[CLS] the first, the last [SEP], which predicts nothing; no pad is predicted, none predicts."""
    text, inputs = make(lengths, tail)
    positions, labels = inputs.targets["positions_M"], inputs.targets["labels_M"]
    real = labels != IGNORED_LABEL
    expected = [at for start, size in zip(text.starts_Q, lengths, strict=True) for at in range(start - 1, start + size)]
    assert positions[real].tolist() == expected
    assert (labels[real] == text.ids_T[positions[real] + 1]).all()
    assert inputs.counts == {"causal": sum(lengths) + len(lengths)} == {"causal": int(real.sum())}
    assert (labels[real] == SEP).sum() == len(lengths) and not (labels == CLS).any()


def test_inputs_are_the_text_and_the_encoder_knows() -> None:
    text, inputs = make([5, 9], 4)
    assert inputs.order == "causal" and inputs.segments_T is None
    assert np.array_equal(inputs.ids_T, text.ids_T)
