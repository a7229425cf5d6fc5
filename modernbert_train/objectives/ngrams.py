"""Which tokens are predicted where whole words are, one to three together (ALBERT, arXiv 1909.11942, section 4.1).

A text is cut into n-grams, one after the other, each of n words with a probability in proportion to 1 / n: 6/11, 3/11
and 2/11. Their order is drawn, and they are taken in that order as long as the budget of the sequence lasts. The one
that it ends in is cut short to as many of its words as fit, as in the published code. What is left then is spent on
single words that fit, in the same order. So a sequence never has more than its budget, and what stays unspent is less
than any word that is not predicted: nothing, as soon as one of them is a single token.

A word is a token with those that go on with it (`Vocabulary.inside_words`, or as a segmenter has it), up to LONGEST;
what is longer, such as a text without spaces, is several words. So fewer than LONGEST tokens stay unspent in any
sequence. Of the share that is asked for, 0.15, text with 2.5 tokens a word gets all in sequences of 120 tokens, 99.5 %
in those of 30, and 74 % in those of 6, where it is less than a word.

Shape legend: T tokens of text, W words, G n-grams, P parts, Q sequences.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from modernbert_train.core.keyed_random import Keys, hash64, uniform

LONGEST = 8  # tokens of a word
MOST_WORDS = 3  # of an n-gram
_LENGTH, _ORDER = (np.uint64(n) for n in (0x4E, 0x9A))
_SHARES = np.cumsum([1 / n for n in range(1, MOST_WORDS + 1)]) / sum(1 / n for n in range(1, MOST_WORDS + 1))
Ints = NDArray[np.int64]


def choose(goes_on_T: NDArray[np.bool_], lengths_P: Ints, sequence_P: Ints, budgets_Q: Ints, keys_Q: Keys) -> Ints:
    """Choose the tokens of whole words.

    Args:
        goes_on_T: whether a token goes on with the word before it, of all texts end to end; a part begins with a word
            in any case.
        lengths_P: tokens of each part of a text, none of them 0; no n-gram lies in two.
        sequence_P: which sequence it is of, ascending.
        budgets_Q: tokens to predict in each sequence, at most.
        keys_Q: uint64 key of each.

    Returns:
        Indices into T, ascending.
    """
    firsts_W = _words(goes_on_T, _starts(lengths_P))
    sizes_W = np.diff(firsts_W, append=len(goes_on_T))
    part_W = np.repeat(np.arange(len(lengths_P)), lengths_P)[firsts_W]
    sequence_W = sequence_P[part_W]
    order_W = _shuffled(part_W, sequence_W, keys_Q)

    taken_W = np.zeros(len(firsts_W), dtype=bool)
    left_Q = budgets_Q.copy()
    while len(order_W):  # a few times: what is left in a sequence is soon less than a word
        sequence, sizes = sequence_W[order_W], sizes_W[order_W]
        begins = np.flatnonzero(np.diff(sequence, prepend=-1))
        before, spent = (
            np.repeat((np.cumsum(sizes) - sizes)[begins], np.diff(begins, append=len(sizes))),
            np.cumsum(sizes),
        )
        fits = spent - before <= left_Q[sequence]
        taken_W[order_W[fits]] = True
        left_Q -= np.bincount(sequence[fits], sizes[fits], minlength=len(left_Q)).astype(np.int64)
        order_W = order_W[~fits & (sizes <= left_Q[sequence])]
    return np.flatnonzero(np.repeat(taken_W, sizes_W))


def _starts(lengths: Ints) -> Ints:
    return np.cumsum(lengths) - lengths


def _words(goes_on_T: NDArray[np.bool_], firsts_P: Ints) -> Ints:
    """The first token of each word, LONGEST apart at the most."""
    begins_T = ~goes_on_T
    begins_T[firsts_P] = True
    firsts_W = np.flatnonzero(begins_T)
    sizes_W = np.diff(firsts_W, append=len(begins_T))
    if (sizes_W > LONGEST).any():
        begins_T |= (np.arange(len(begins_T)) - np.repeat(firsts_W, sizes_W)) % LONGEST == 0
        firsts_W = np.flatnonzero(begins_T)
    return firsts_W


def _shuffled(part_W: Ints, sequence_W: Ints, keys_Q: Keys) -> Ints:
    """All words, sequence after sequence: n-grams in drawn order, the words of each in theirs."""
    number_W = np.arange(len(part_W))
    words_P, words_Q = np.bincount(part_W), np.bincount(sequence_W, minlength=len(keys_Q))
    first_W = _starts(words_P)[part_W]  # word of the part
    keys_W, counters_W = keys_Q[sequence_W], (number_W - _starts(words_Q)[sequence_W]).astype(np.uint64)
    # the g-th draw of a part is the length of its g-th n-gram; there are at most as many n-grams as words
    lengths_W = 1 + np.searchsorted(_SHARES, uniform(hash64(keys_W ^ _LENGTH, counters_W)), side="right")
    begins_W = _starts(lengths_W)
    begins_W -= begins_W[first_W]
    real_W = begins_W < words_P[part_W]
    first_G, sequence_G = (first_W + begins_W)[real_W], sequence_W[real_W].astype(np.uint64)
    draws_G = hash64(keys_W[real_W] ^ _ORDER, counters_W[real_W])
    sorted_G = np.argsort((sequence_G << np.uint64(40)) | (draws_G >> np.uint64(24)), kind="stable")
    sizes_G = np.diff(first_G, append=len(part_W))[sorted_G]
    return np.repeat(first_G[sorted_G] - _starts(sizes_G), sizes_G) + number_W
