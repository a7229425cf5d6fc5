"""A microbatch of given document lengths, for tests that run the real model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from benchmarks.batches import lay_out, mlm_batch
from modernbert_train.batch import Batch


def make_batch(lengths: Sequence[int], predicted: int) -> Batch:
    """Concatenate documents into a microbatch; the first `predicted` tokens are predicted.

    Args:
        lengths: tokens of each document.
        predicted: positions with a label.
    """
    tokens = sum(lengths)
    packed = lay_out(torch.zeros(tokens, dtype=torch.int64), [0, *accumulate(lengths)], max(lengths))
    return mlm_batch(packed, torch.arange(predicted))
