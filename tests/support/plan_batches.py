"""A microbatch of given document lengths and torch's counter, for tests that run the real model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

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


@contextmanager
def counting_flops() -> Iterator[FlopCounterMode]:
    """Count FLOPs by torch's counter, which has counts for the plain attention formula on every device; its backward
    pass does not recompute scores."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        yield counter
