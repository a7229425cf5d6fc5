"""Two halves and their order. If this breaks, the order can be read off something else, or text is lost in a swap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from modernbert_train.batch import IGNORED_LABEL, Inputs, PackedText
from modernbert_train.config.schema import SentenceOrderConfig
from modernbert_train.objectives.sop import SentenceOrder
from tests.support import mlm_lines
from tests.support.mlm_lines import CLS, MASK, PAD, SEP, UNK, VOCABULARY

STOP = UNK  # ends a sentence; no text has one
KEPT = SentenceOrderConfig(mask_token_share=0.0, random_token_share=0.0)


def text_of(lengths: list[int], tail: int = 0) -> PackedText:
    """With room for the [SEP] between the halves."""
    return mlm_lines.text_of(lengths, tail, ends=2)


def make(text: PackedText, config: SentenceOrderConfig = KEPT, ends: tuple[int, ...] = ()) -> Inputs:
    vocabulary = replace(VOCABULARY, sentence_ends=np.array(ends, dtype=np.int64))
    return SentenceOrder(config, vocabulary).make(text, config)


def halves(text: PackedText, inputs: Inputs) -> Iterator[tuple[list[int], list[int], int, NDArray[Any]]]:
    """Of each pair its halves as they are read, 0 or 1, and the token types of its sequence."""
    labels = inputs.targets["swapped_P"]
    for at, label in zip(inputs.targets["pairs_P"][labels != IGNORED_LABEL], labels, strict=False):
        number = text.starts_Q.tolist().index(at + 1)
        end = at + 1 + int(text.lengths_Q[number]) + 2
        own = inputs.ids_T[at + 1 : end - 1].tolist()
        middle = own.index(SEP)
        assert inputs.ids_T[at] == CLS and inputs.ids_T[end - 1] == SEP
        assert inputs.segments_T is not None
        yield own[:middle], own[middle + 1 :], int(label), inputs.segments_T[at:end]


def test_a_pair_is_the_text_in_its_order_or_swapped() -> None:
    """With nothing masked: not a token is lost or doubled, and token types say where the second half begins."""
    lengths = [int(length) for length in np.random.default_rng(0).integers(2, 60, 400)]
    text = text_of(lengths, tail=9)
    swapped = []
    found = list(halves(text, make(text)))
    assert len(found) == len(lengths)
    for (first, second, label, types), start, length in zip(found, text.starts_Q, lengths, strict=True):
        original = text.ids_T[start : start + length].tolist()
        assert first and second and (second + first if label else first + second) == original
        assert types.tolist() == [0] * (len(first) + 2) + [1] * (len(second) + 1)
        assert min(len(first), len(second)) >= max(1, length // 4), "a half of a few tokens tells nothing"
        swapped.append(label)
    assert abs(np.mean(swapped) - 0.5) < 0.13


def test_texts_are_cut_where_a_sentence_ends() -> None:
    """If one does in the middle half; the first half as it was written ends with it."""
    text = text_of([40] * 50)
    for start in text.starts_Q:
        text.ids_T[[start + at for at in (3, 17, 24, 38)]] = STOP
    ends = set()
    for first, second, label, _ in halves(text, make(text, ends=(STOP,))):
        written = second if label else first
        ends.add(len(written))
        assert written[-1] == STOP
    assert ends == {18, 25}


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_the_share_of_swapped_pairs_is_as_configured(share: float) -> None:
    text = text_of([20] * 2000)
    labels = make(text, replace(KEPT, swapped_share=share)).targets["swapped_P"]
    assert abs(labels[labels != IGNORED_LABEL].mean() - share) < 0.035


def test_one_token_has_no_order() -> None:
    """It stays as it is, and counts for its masked tokens only."""
    text = text_of([1, 30, 1], tail=3)
    inputs = make(text, replace(KEPT, mask_rate=1.0))
    labels = inputs.targets["swapped_P"]
    assert inputs.counts == {"mlm": 32, "sop": 1} and (labels != IGNORED_LABEL).sum() == 1
    assert inputs.targets["pairs_P"][0] == text.starts_Q[1] - 1
    assert (inputs.ids_T[[0, 1, 2, 3]] == text.ids_T[[0, 1, 2, 3]]).all()


@pytest.mark.parametrize("masking", ["exact", "bernoulli", "reference"])
def test_masked_tokens_are_predicted_where_they_stand(masking: Any) -> None:
    """In the text as it is read, each once. `reference` predicts [CLS] and the last [SEP] like any token, the others
    nothing special."""
    text, config = text_of([30, 2, 11, 1, 57, 3] * 40, tail=12), SentenceOrderConfig(masking=masking, mask_rate=0.5)
    plain, inputs = make(text), make(text, config)
    real = inputs.targets["labels_M"] != IGNORED_LABEL
    positions, labels = inputs.targets["positions_M"][real], inputs.targets["labels_M"][real]
    assert inputs.counts["mlm"] == len(labels) > 800 and len(set(positions.tolist())) == len(positions)
    assert np.array_equal(labels, plain.ids_T[positions])
    others = [np.delete(each.ids_T, positions) for each in (inputs, plain)]
    assert masking == "reference" or np.array_equal(*others)  # it overwrites what it does not predict
    assert (inputs.ids_T[positions] == MASK).sum() > 400 and not (labels == PAD).any()
    assert {CLS, SEP} < {*labels.tolist()} if masking == "reference" else (labels >= 5).all()
