"""Packed text for objectives, and statistics of the masks that they draw."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from modernbert_train.batch import PackedText
from modernbert_train.core.keyed_random import derive, derive_each
from modernbert_train.vocabulary import Vocabulary

PAD, UNK, CLS, SEP, MASK = range(5)
VOCABULARY = Vocabulary(
    num_entries=100, cls_id=CLS, sep_id=SEP, pad_id=PAD, mask_id=MASK, ordinary=np.arange(5, 100), sha256=""
)
WORDS = replace(VOCABULARY, inside_words=np.arange(60, 100))  # ids from 60 on continue a word
Line = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


def lay(
    texts: Iterable[Sequence[int]], tail: int = 0, *, ends: int = 1, between: int = 0, of: Vocabulary = VOCABULARY
) -> Line:
    """Concatenate texts, and return the ids with where the texts start and how long they are.

    Args:
        texts: ids; [CLS] is put before each.
        tail: pads after the last text.
        ends: [SEP] after each text.
        between: pads after each text.
        of: the vocabulary of the special tokens.
    """
    ids: list[int] = []
    starts, lengths = [], []
    for text in texts:
        starts.append(len(ids) + 1)
        lengths.append(len(text))
        ids += [of.cls_id, *text, *[of.sep_id] * ends, *[of.pad_id] * between]
    return np.array(ids + [of.pad_id] * tail, np.int64), np.array(starts, np.int64), np.array(lengths, np.int64)


def line(
    lengths: Sequence[int], tail: int = 0, *, ends: int = 1, between: int = 0, of: Vocabulary = VOCABULARY
) -> Line:
    """Return `lay` of texts with these lengths, drawn from the ordinary ids; always the same."""
    draw = np.random.default_rng(7)
    texts = [draw.choice(of.ordinary, length).tolist() for length in lengths]
    return lay(texts, tail, ends=ends, between=between, of=of)


def keys(number: int, first: int = 0) -> NDArray[np.uint64]:
    return derive_each(derive(17, 3), np.arange(first, first + number))


def pack(at: Line, tail: int = 0, first_key: int = 0) -> PackedText:
    """Return what an objective reads of a line that ends in `tail` pads."""
    ids, starts, lengths = at
    boundaries = [*(starts - 1), len(ids) - tail, *([len(ids)] if tail else [])]
    return PackedText(ids, starts, lengths, keys(len(lengths), first_key), np.array(boundaries))


def text_of(
    lengths: Sequence[int], tail: int = 0, first_key: int = 0, *, ends: int = 1, between: int = 0
) -> PackedText:
    return pack(line(lengths, tail, ends=ends, between=between), tail, first_key)


def five_sigma(share: float, number: int) -> float:
    return 5 * math.sqrt(share * (1 - share) / number)


def chi_square(counts: NDArray[np.integer], expected: NDArray[np.float64] | float) -> float:
    """Return the excess over the expectation, in sigmas."""
    degrees = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees))
