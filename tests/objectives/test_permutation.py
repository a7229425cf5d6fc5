"""Permutation language modelling: visibility. One visible token too many, and a model reads its target.

The rule is compared with a table of every pair, written out from XLNet's published code without the ranks used here.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from modernbert_train.batch import IGNORED_LABEL, QUERY_RANK, Given, Inputs, PackedText
from modernbert_train.config.schema import PermutationLmConfig
from modernbert_train.objectives.permutation import PermutationLM
from modernbert_train.vocabulary import Vocabulary
from tests.support.mlm_lines import CLS, MASK, PAD, SEP, VOCABULARY, WORDS, text_of

CONFIG = PermutationLmConfig()


def make(text: PackedText, config: PermutationLmConfig = CONFIG, vocabulary: Vocabulary = WORDS) -> Inputs:
    return PermutationLM(config, vocabulary).make(text, config)


def given_of(inputs: Inputs) -> Given:
    assert inputs.order == "given" and inputs.given is not None
    return inputs.given


def queries_of(inputs: Inputs) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of the used query tokens, and the target of each."""
    real = inputs.targets["labels_M"] != IGNORED_LABEL
    return inputs.targets["positions_M"][real], inputs.targets["labels_M"][real]


def seen(given: Given) -> NDArray[np.bool_]:
    """Which key (column) each query (row) sees."""
    sequence = np.searchsorted(given.boundaries, np.arange(len(given.ranks_T)), side="right")
    return (sequence[:, None] == sequence) & (given.ranks_T < given.limits_T[:, None])


def perm_mask(order: list[int], predicted: set[int], functional: set[int], size: int) -> NDArray[np.bool_]:
    """The published rule, pair by pair: which j is hidden from i. `order` has a rank for each of both kinds."""
    hidden = np.zeros((size, size), dtype=bool)
    rank = {token: number for number, token in enumerate(order)}
    for i in range(size):
        own = rank[i] if i in predicted else rank.get(i, -1) + 1
        for j in range(size):
            hidden[i, j] = j in predicted | functional and own <= rank[j]
    return hidden


@pytest.mark.parametrize("lengths", [[40], [1, 30, 2], [13, 55, 6, 6, 6]])
def test_every_pair_is_seen_or_hidden_as_in_the_published_code(lengths: list[int]) -> None:
    """Content: the mask with its diagonal opened. Queries: the mask unchanged. No token sees a query."""
    text = text_of(lengths, tail=7)
    inputs = make(text)
    given = given_of(inputs)
    sees, (queries, labels) = seen(given), queries_of(inputs)
    for number, length in enumerate(lengths):
        start, end = given.boundaries[number : number + 2]
        size = length + 2
        own = queries[(queries >= start) & (queries < end)]
        assert own.tolist() == list(range(start + size, end)), "query tokens end their sequence"
        asked = given.position_ids_T[own]
        predicted, functional = set(asked.tolist()), {0, size - 1}
        ranks = given.ranks_T[start : start + size]
        order = sorted(predicted | functional, key=lambda token: ranks[token])
        hidden = perm_mask(order, predicted, functional, size)
        content = ~hidden | np.eye(size, dtype=bool)
        block = sees[start:end, start:end]
        assert np.array_equal(block[:size, :size], content)
        assert np.array_equal(block[size:, :size], ~hidden[asked])
        assert not block[:, size:].any()
        assert labels[(queries >= start) & (queries < end)].tolist() == inputs.ids_T[start + asked].tolist()
    rest = slice(int(given.boundaries[len(lengths) + 1]), None)
    assert (given.ranks_T[rest] == QUERY_RANK).all() and not sees[rest].any(), "spare query tokens see nothing"
    pads = slice(*given.boundaries[len(lengths) : len(lengths) + 2])
    assert (inputs.ids_T[pads] == PAD).all() and sees[pads, pads].all()


def test_the_buffer_is_the_text_and_its_query_tokens() -> None:
    """No token of text is changed or lost; positions are unchanged, and each query has its target's."""
    text = text_of([30, 9, 50], tail=5)
    inputs = make(text)
    given, (queries, _) = given_of(inputs), queries_of(inputs)
    content = given.ranks_T != QUERY_RANK
    assert np.array_equal(inputs.ids_T[content], text.ids_T) and (inputs.ids_T[queries] == MASK).all()
    places = np.concatenate([np.arange(size) for size in np.diff(text.boundaries)])
    assert np.array_equal(given.position_ids_T[content], places)
    assert inputs.counts == {"permutation": len(queries)} and len(queries) > 10
    assert (
        given.boundaries[0] == 0 and given.boundaries[-1] == len(inputs.ids_T) and (np.diff(given.boundaries) > 0).all()
    )
    for start, end in zip(given.boundaries, given.boundaries[1:], strict=False):
        special = np.isin(inputs.ids_T[start:end], (CLS, SEP)).sum()
        assert special in (0, 2), "no sequence holds another's tokens"


@pytest.mark.parametrize("ratio", [1, 6, 7, 10])
def test_each_sequence_has_its_share_rounded_up_or_down(ratio: int) -> None:
    lengths = np.random.default_rng(2).integers(1, 90, 300).tolist()
    predicted, sequence = PermutationLM(replace(CONFIG, context_ratio=ratio), WORDS).predicted(text_of(lengths))
    counts = np.bincount(sequence, minlength=len(lengths))
    share = np.array(lengths) / ratio
    assert ((counts >= np.floor(share)) & (counts <= np.ceil(share))).all()
    assert counts.sum() == pytest.approx(sum(lengths) / ratio, abs=3 * len(lengths) ** 0.5)
    assert (np.diff(predicted) > 0).all()


def test_spans_have_lengths_of_one_in_n_and_begin_with_a_word() -> None:
    """In long texts, where few spans are cut or filled up; a context of 60 tokens separates spans."""
    length = 200_000
    text = text_of([length])
    objective = PermutationLM(replace(CONFIG, context_ratio=10), WORDS)
    predicted, _ = objective.predicted(text)
    starts = predicted[np.append(True, np.diff(predicted) > 1)]
    sizes = np.diff(np.append(np.flatnonzero(np.append(True, np.diff(predicted) > 1)), len(predicted)))
    at_word = ~np.isin(text.ids_T[starts], WORDS.inside_words)
    assert at_word.mean() > 0.95, "all but what fills up"
    found = np.bincount(sizes[at_word], minlength=6)[1:6] / at_word.sum()
    expected = 1 / np.arange(1, 6) / (1 / np.arange(1, 6)).sum()
    assert np.abs(found - expected).max() < 0.03, (found, expected)


def test_an_order_is_any_order() -> None:
    """Each of the tokens of an order, [CLS] and [SEP] too, comes first as often as any other."""
    text = text_of([24] * 3000)
    ranks = given_of(make(text, vocabulary=VOCABULARY)).ranks_T
    first = np.isin(ranks, 0).sum()
    assert first == 3000
    content = ranks[ranks != QUERY_RANK].reshape(-1, 26)[:3000]
    assert np.array_equal(np.sort(content, axis=1)[:, -6:], np.tile(np.arange(6), (3000, 1)))
    for special in (0, 25):
        assert np.abs(np.bincount(content[:, special]) / 3000 - 1 / 6).max() < 0.03


@pytest.mark.runs
def test_the_bound_holds_for_the_shortest_texts() -> None:
    """A step that finds no room for its predictions would end the run."""
    for length in (1, 2, 3, 5, 6, 7):
        for ratio in (1, 2, 6, 10):
            make(text_of([length] * 600, first_key=length), replace(CONFIG, context_ratio=ratio))
