"""Texts in permuted orders."""

from __future__ import annotations

import numpy as np

from modernbert_train.batch import PackedText
from tests.support.mlm_lines import keys, line


def text_of(lengths: list[int], tail: int = 0, first_key: int = 0) -> PackedText:
    ids, starts, sizes = line(lengths, tail)
    boundaries = [*(starts - 1), len(ids) - tail, *([len(ids)] if tail else [])]
    return PackedText(ids, starts, sizes, keys(len(lengths), first_key), np.array(boundaries))
