"""Lines of text for masked language modelling."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from modernbert_train.core.keyed_random import derive, derive_each
from modernbert_train.vocabulary import Vocabulary

PAD, UNK, CLS, SEP, MASK = range(5)
VOCABULARY = Vocabulary(
    num_entries=100, cls_id=CLS, sep_id=SEP, pad_id=PAD, mask_id=MASK, ordinary=np.arange(5, 100), sha256=""
)
Line = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


def line(lengths: Sequence[int], tail: int = 0) -> Line:
    """[CLS] text [SEP] for each length and a tail of pads, with where the texts start and how long they are."""
    draw = np.random.default_rng(7)
    ids: list[int] = []
    starts = []
    for length in lengths:
        starts.append(len(ids) + 1)
        ids += [CLS, *draw.integers(5, 100, length).tolist(), SEP]
    return np.array(ids + [PAD] * tail, np.int64), np.array(starts, np.int64), np.array(lengths, np.int64)


def keys(number: int, first: int = 0) -> NDArray[np.uint64]:
    return derive_each(derive(17, 3), np.arange(first, first + number))
