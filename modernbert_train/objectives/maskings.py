"""How predicted tokens are chosen (`objective.masking`). To add one, write a function and a row in CHOOSE, and its
facts in MASKINGS of config/objective.py.

- `exact`: each sequence gets its exact share: rate times its tokens, rounded up or down by key. Short sequences have
  targets, and the number of targets hardly varies.
- `bernoulli`: each token with the probability of the rate, independently of all others.
- `reference`: statistically as in AnswerDotAI/ModernBERT's training. Like `bernoulli`, but [CLS] and [SEP] are
  predicted like any token; padding is replaced at the same rate, without being predicted; and random tokens are any id
  up to the largest, special ones too. There the largest id is the row's after masking; here it is the largest possible
  id. In their rows of 98,304 tokens these are equal, and ours does not depend on the other sequences of a row.
- `ngram`: each sequence gets at most the share of `exact`, in whole words, one to three together (ngrams.py).
  `objective.words` chooses the word boundaries: the tokenizer's pieces joined, or a segmenter's words.

Shape legend: N tokens that may be predicted, end to end; S sequences; C chosen tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from modernbert_train.config.objective import Masking
from modernbert_train.core.keyed_random import Keys, uniform
from modernbert_train.objectives import ngrams

Ints = NDArray[np.int64]

_SLACK = 32  # see `bound`
_SURPRISE = 45.0  # the bound of independent draws fails with a probability below e^-45, once in 10^19 microbatches


@dataclass(frozen=True)
class Candidates:
    """The tokens that may be predicted, concatenated.

    Attributes:
        sequence_N: the sequence of each, ascending.
        place_N: its position in the sequence.
        draws_N: uint64 draw of each.
        lengths_S: tokens of each sequence.
        cuts_S: tokens of a sequence before a break in its text, which n-grams may not cross; 0 or all without a break.
        counts_S: tokens to predict in each sequence, by its rate and its draw.
        rate_S: share of each sequence to predict.
        keys_S: uint64 key of each.
        continues_word_N: a function that returns, for each token, True if it continues the word before it.
        further_words_N: a function that returns, for each token, how many words begin inside it.
    """

    sequence_N: Ints
    place_N: Ints
    draws_N: Keys
    lengths_S: Ints
    cuts_S: Ints
    counts_S: Ints
    rate_S: NDArray[np.float64]
    keys_S: Keys
    continues_word_N: Callable[[], NDArray[np.bool_]]
    further_words_N: Callable[[], Ints]


def bound(masking: Masking, mask_rate: float, tokens: int) -> int:
    """Return a bound on the predicted positions in `tokens` packed tokens, to which targets are padded.

    Exact counts: a sequence of n text tokens has rate * n of them plus a rounding below one, while its two special
    tokens leave 2 * rate unused. With 32 more the bound fails with a probability below e^-38 for rates from 0.15.

    Independent draws: Bernstein's inequality for a binomial of `tokens` trials, exceeded with a probability below
    e^-45. At a rate of 0.3 that is 24 % above the mean for 4,096 tokens, and 5 % for 98,304.
    """
    expected = mask_rate * tokens + _SLACK
    if not masking.counts_exactly:
        variance = mask_rate * (1 - mask_rate) * tokens
        third = _SURPRISE / 3
        expected = mask_rate * tokens + third + math.sqrt(third**2 + 2 * _SURPRISE * variance)
    return -(-math.ceil(expected) // 8) * 8


def _exact(text: Candidates) -> Ints:
    """Choose the tokens with the lowest draws of each sequence."""
    keys = (text.sequence_N.astype(np.uint64) << np.uint64(40)) | (text.draws_N >> np.uint64(24))
    order = np.argsort(keys, kind="stable")
    return np.sort(order[text.place_N < text.counts_S[text.sequence_N]])


def _bernoulli(text: Candidates) -> Ints:
    """Choose each token whose draw is below the rate."""
    return np.flatnonzero(uniform(text.draws_N) < text.rate_S[text.sequence_N])


def _ngram(text: Candidates) -> Ints:
    """Choose whole words, up to three together, in each part before and after a cut."""
    lengths = np.stack((text.cuts_S, text.lengths_S - text.cuts_S), axis=1).ravel()
    sequence = np.repeat(np.arange(len(text.lengths_S)), 2)[lengths > 0]
    words = text.continues_word_N(), text.further_words_N()
    return ngrams.choose(*words, lengths[lengths > 0], sequence, text.counts_S, text.keys_S)


# each returns the indices into N of the chosen tokens, ascending
CHOOSE: dict[str, Callable[[Candidates], Ints]] = {
    "exact": _exact,
    "bernoulli": _bernoulli,
    "reference": _bernoulli,
    "ngram": _ngram,
}
