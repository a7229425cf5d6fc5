"""Choose whole words to predict, one to three together (ALBERT, arXiv 1909.11942, section 4.1).

A text is cut into n-grams, one after the other, of n words with probability proportional to 1 / n: 6/11, 3/11 and 2/11.
N-grams are chosen in random order until the sequence's budget is spent. The n-gram that exceeds the budget is cut to
the words that fit, as in the published code. The remaining budget goes to single words that fit, in the same order. So
a sequence never exceeds its budget, and the unspent rest is smaller than any unpredicted word: zero, as soon as one of
them is a single token.

A token of a SuperBPE may hold several words; each counts, and they are predicted together.

A word is a token and the tokens that continue it (`Vocabulary.inside_words`, or a segmenter's), up to LONGEST; anything
longer, such as a text without spaces, is several words. So fewer than LONGEST tokens stay unspent in a sequence. With a
rate of 0.15 and 2.5 tokens a word, sequences of 120 tokens spend all of it, sequences of 30 tokens 99.5 %, and
sequences of 6 tokens, where it is less than a word, 74 %.

Shape legend: T tokens of text, W words, U units of words, G n-grams, P parts, Q sequences.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from modernbert_train.core.keyed_random import Keys, hash64, uniform

LONGEST = 8  # tokens of a word
MAX_WORDS = 3  # words of an n-gram
_LENGTH, _ORDER = (np.uint64(n) for n in (0x4E, 0x9A))
_SHARES = np.cumsum([1 / n for n in range(1, MAX_WORDS + 1)]) / sum(1 / n for n in range(1, MAX_WORDS + 1))
Ints = NDArray[np.int64]


def choose(
    goes_on_T: NDArray[np.bool_], further_T: Ints, lengths_P: Ints, sequence_P: Ints, budgets_Q: Ints, keys_Q: Keys
) -> Ints:
    """Choose the tokens of whole words.

    Args:
        goes_on_T: True if a token continues the word before it, for all texts concatenated; a part always begins with
            a new word.
        further_T: words that begin inside each token.
        lengths_P: tokens of each part of a text, never 0; no n-gram crosses parts.
        sequence_P: the sequence of each part, ascending.
        budgets_Q: largest number of tokens to predict in each sequence.
        keys_Q: uint64 key of each.

    Returns:
        Indices into T, ascending.
    """
    firsts_U = _words(goes_on_T, _starts(lengths_P))
    sizes_U = np.diff(firsts_U, append=len(goes_on_T))
    part_U = np.repeat(np.arange(len(lengths_P)), lengths_P)[firsts_U]
    sequence_U = sequence_P[part_U]
    order_U = _shuffled(part_U, sequence_U, keys_Q, 1 + np.add.reduceat(further_T, firsts_U))

    taken_U = np.zeros(len(firsts_U), dtype=bool)
    left_Q = budgets_Q.copy()
    while len(order_U):  # a few rounds: the rest of a sequence's budget is soon less than a word
        sequence, sizes = sequence_U[order_U], sizes_U[order_U]
        begins = np.flatnonzero(np.diff(sequence, prepend=-1))
        before, spent = (
            np.repeat((np.cumsum(sizes) - sizes)[begins], np.diff(begins, append=len(sizes))),
            np.cumsum(sizes),
        )
        fits = spent - before <= left_Q[sequence]
        taken_U[order_U[fits]] = True
        left_Q -= np.bincount(sequence[fits], sizes[fits], minlength=len(left_Q)).astype(np.int64)
        order_U = order_U[~fits & (sizes <= left_Q[sequence])]
    return np.flatnonzero(np.repeat(taken_U, sizes_U))


def _starts(lengths: Ints) -> Ints:
    return np.cumsum(lengths) - lengths


def _words(goes_on_T: NDArray[np.bool_], firsts_P: Ints) -> Ints:
    """Return the first token of each word; a word has at most LONGEST tokens."""
    begins_T = ~goes_on_T
    begins_T[firsts_P] = True
    firsts_W = np.flatnonzero(begins_T)
    sizes_W = np.diff(firsts_W, append=len(begins_T))
    if (sizes_W > LONGEST).any():
        begins_T |= (np.arange(len(begins_T)) - np.repeat(firsts_W, sizes_W)) % LONGEST == 0
        firsts_W = np.flatnonzero(begins_T)
    return firsts_W


def _shuffled(part_U: Ints, sequence_U: Ints, keys_Q: Keys, words_U: Ints) -> Ints:
    """Return all units by sequence: n-grams in drawn order, the units of an n-gram in text order.

    A unit is a word, or several that share a token; it belongs to the n-gram of its first word.
    """
    part_W, sequence_W = np.repeat(part_U, words_U), np.repeat(sequence_U, words_U)
    number_W = np.arange(len(part_W))
    words_P, words_Q = np.bincount(part_W), np.bincount(sequence_W, minlength=len(keys_Q))
    first_W = _starts(words_P)[part_W]  # first word of the part
    keys_W, counters_W = keys_Q[sequence_W], (number_W - _starts(words_Q)[sequence_W]).astype(np.uint64)
    # the g-th draw of a part is the length of its g-th n-gram; there are at most as many n-grams as words
    lengths_W = 1 + np.searchsorted(_SHARES, uniform(hash64(keys_W ^ _LENGTH, counters_W)), side="right")
    begins_W = _starts(lengths_W)
    begins_W -= begins_W[first_W]
    real_W = begins_W < words_P[part_W]
    first_G, sequence_G = (first_W + begins_W)[real_W], sequence_W[real_W].astype(np.uint64)
    draws_G = hash64(keys_W[real_W] ^ _ORDER, counters_W[real_W])
    sorted_G = np.argsort((sequence_G << np.uint64(40)) | (draws_G >> np.uint64(24)), kind="stable")
    first_G = np.searchsorted(_starts(words_U), first_G)  # in units; an n-gram inside a unit is empty
    sizes_G = np.diff(first_G, append=len(part_U))[sorted_G]
    return np.repeat(first_G[sorted_G] - _starts(sizes_G), sizes_G) + np.arange(len(part_U))
