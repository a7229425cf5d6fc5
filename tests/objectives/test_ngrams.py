"""`ngram` masking: whole words, one to three together, within the share that exact masking gives.

If this breaks, words are masked in part and can be guessed from their rest, n-grams are of another law than the
paper's, or a batch does not fit into its fixed shape. All draws are keyed, so nothing flickers.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from modernbert_train.config.schema import MaskedLmConfig, SentenceOrderConfig
from modernbert_train.objectives import build_objective, ngrams
from modernbert_train.objectives.mlm import Masked, MaskedLM
from modernbert_train.objectives.sop import SentenceOrder
from modernbert_train.vocabulary import Vocabulary
from tests.support.mlm_lines import MASK, SEP, WORDS, Line, five_sigma, keys, lay, pack

NGRAM, EXACT = (MaskedLmConfig(masking=name) for name in ("ngram", "exact"))
ALL_MASKED = replace(NGRAM, mask_token_share=1.0, random_token_share=0.0)


def texts_of(lengths: list[int], inside: float = 0.4, seed: int = 7) -> list[list[int]]:
    """Return text in which a token continues a word with this probability."""
    draw = np.random.default_rng(seed)
    return [
        np.where(draw.random(n) < inside, draw.integers(60, 100, n), draw.integers(5, 60, n)).tolist() for n in lengths
    ]


def corrupt(at: Line, rate: float = 0.15, config: MaskedLmConfig = NGRAM, vocabulary: Vocabulary = WORDS) -> Masked:
    return MaskedLM(config, vocabulary).corrupt(*at, keys(len(at[1])), rate)


def words_of(text: list[int]) -> list[list[int]]:
    """Places of the tokens of each word, written the plain way."""
    words: list[list[int]] = []
    for place, token in enumerate(text):
        if token < 60 or not words or len(words[-1]) == ngrams.LONGEST:
            words.append([])
        words[-1].append(place)
    return words


def budgets(at: Line, rate: float) -> NDArray[np.int64]:
    """Return the budget of exact masking for each sequence."""
    found = corrupt(at, rate, EXACT).positions_M
    return np.histogram(found, bins=[*at[1], len(at[0])])[0]


@pytest.mark.runs
@example([[5, *[70] * 99]], 0.3)  # a long word is several, or it would never be predicted, or all of it at once
@given(
    st.lists(st.lists(st.integers(5, 99), min_size=1, max_size=60), min_size=1, max_size=6),
    st.sampled_from([0.02, 0.15, 0.3, 0.7, 1.0]),
)
def test_words_are_predicted_whole_and_within_the_share(texts: list[list[int]], rate: float) -> None:
    """Never more than exact masking; the unspent rest is smaller than any word that is not predicted."""
    at = lay(texts, between=2)
    masked = corrupt(at, rate, ALL_MASKED)
    predicted = set(masked.positions_M.tolist())
    assert (np.diff(masked.positions_M) > 0).all() and (masked.labels_M == at[0][masked.positions_M]).all()
    assert set(np.flatnonzero(masked.input_ids_T != at[0])) == predicted
    for text, start, budget in zip(texts, at[1].tolist(), budgets(at, rate).tolist(), strict=True):
        words = words_of(text)
        chosen = [sum(start + place in predicted for place in word) for word in words]
        assert all(number in (0, len(word)) for number, word in zip(chosen, words, strict=True))
        left = budget - sum(chosen)
        spared = [len(word) for word, number in zip(words, chosen, strict=True) if not number]
        assert 0 <= left < min(spared, default=left + 1) and left < ngrams.LONGEST


@pytest.mark.parametrize(("further", "longest", "neighbours"), [(0, 3, 0.55), (1, 2, 0.35), (2, 1, 0.05)])
def test_tokens_of_several_words_count_as_so_many(further: int, longest: int, neighbours: float) -> None:
    """Three tokens of three words each would be nine words to guess, where the paper masks three."""
    vocabulary = replace(WORDS, inside_words=np.empty(0, np.int64), further_words=np.repeat(np.arange(5, 100), further))
    texts = texts_of([4000], inside=0.0)
    at = lay(texts)
    masked = corrupt(at, 0.02, ALL_MASKED, vocabulary)
    assert abs(len(masked.positions_M) - 0.02 * 4000) <= 1, "the share is of tokens"
    runs = np.split(masked.positions_M, np.flatnonzero(np.diff(masked.positions_M) > 1) + 1)
    together = sum(len(run) for run in runs if len(run) > 1) / len(masked.positions_M)
    assert abs(together - neighbours) < 0.2 and np.median([len(run) for run in runs]) <= longest


# each token is a word, as the characters of Chinese BERT are
WORDLESS = replace(WORDS, inside_words=np.empty(0, np.int64))


@pytest.mark.parametrize("name", ["mlm", "sop"])
def test_words_of_a_segmenter_are_masked_as_those_of_a_vocabulary(name: str) -> None:
    """To the token, whose words they are makes no difference; also where the halves of a text change places."""
    of_pieces = {"mlm": MaskedLmConfig, "sop": SentenceOrderConfig}[name](masking="ngram")
    text = pack(lay(texts_of([30, 1, 2, 90, 55] * 20), ends=of_pieces.special_tokens - 1))
    expected = build_objective(of_pieces, WORDS).make(text, of_pieces)
    of_words = replace(of_pieces, words="segmenter")
    found = build_objective(of_words, WORDLESS).make(replace(text, inside_words_T=text.ids_T >= 60), of_words)
    assert found.ids_T.tolist() == expected.ids_T.tolist() and found.counts == expected.counts
    for target, values in expected.targets.items():
        assert found.targets[target].tolist() == values.tolist()


def test_of_texts_of_a_few_words_most_of_the_share_is_spent() -> None:
    short = lay(texts_of([6] * 4000, inside=0.6))
    found, asked = len(corrupt(short).positions_M), budgets(short, 0.15).sum()
    assert 0.7 * asked < found < asked  # words of two and a half tokens on average, a budget of 0.9


def runs_of_words(at: Line, masked: Masked) -> NDArray[np.int64]:
    """How many words lie together, of all predicted ones."""
    predicted = np.isin(np.arange(len(at[0])), masked.positions_M)
    first = predicted & (at[0] < 60)
    edges = np.flatnonzero(np.diff(np.r_[False, predicted, False].astype(int)))
    totals = np.r_[0, np.cumsum(first)]
    return totals[edges[1::2]] - totals[edges[::2]]


def test_n_grams_have_the_law_of_the_paper() -> None:
    """6/11, 3/11, 2/11. At a rate of 1 % they hardly ever touch, so that what lies together is one of them; in a text
    of 20,000 words the one that is cut short does not count."""
    at = lay(texts_of([30_000] * 12, inside=0.3))
    for start in at[1]:
        at[0][start] = 5  # a text begins with a word
    found = np.bincount(runs_of_words(at, corrupt(at, 0.01)))[1:]
    total = found[:3].sum()
    assert total > 1500 and found[3:].sum() < 0.05 * total
    # two that touch count as one longer
    for share, expected in zip(found[:3] / total, (6 / 11, 3 / 11, 2 / 11), strict=True):
        assert abs(share - expected) < five_sigma(expected, total) + 0.01


def test_the_rest_is_drawn_for_each_token() -> None:
    """Within a word too, as in the published code."""
    masked = corrupt(lay(texts_of([400] * 300)))
    inputs = masked.input_ids_T[masked.positions_M]
    next_inside = (np.diff(masked.positions_M) == 1) & (masked.labels_M[1:] >= 60)
    mixed = (inputs[:-1] == MASK) != (inputs[1:] == MASK)
    assert abs(mixed[next_inside].mean() - 2 * 0.8 * 0.2) < 2 * five_sigma(0.32, int(next_inside.sum()))


def test_no_word_and_no_n_gram_lies_in_two_halves() -> None:
    """A cut in a text cuts its words; the token after the [SEP] does not continue the word before it."""
    settings = SentenceOrderConfig(masking="ngram", mask_rate=0.3, mask_token_share=1.0, random_token_share=0.0)
    packed = pack(lay(texts_of([30] * 400, inside=0.5), ends=2))
    made = SentenceOrder(settings, WORDS).make(packed, settings)
    labels, positions = (made.targets[name] for name in ("labels_M", "positions_M"))
    original = made.ids_T.copy()
    original[positions[labels >= 0]] = labels[labels >= 0]
    predicted = set(positions[labels >= 0].tolist())
    across = 0
    for start in packed.starts_Q.tolist():
        middle = start + original[start : start + 31].tolist().index(SEP)
        for first, end in ((start, middle), (middle + 1, start + 31)):
            half = original[first:end].tolist()
            for word in words_of(half):
                assert len({first + place in predicted for place in word}) == 1
        across += {middle - 1, middle + 1} <= predicted
    # two n-grams meet at a cut by chance alone; were they one text, a good part of all would
    assert across / 400 < 0.3**2 + 0.08
