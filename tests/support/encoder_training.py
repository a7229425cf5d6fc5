"""Encoders in training."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from benchmarks.batches import mlm_batch
from modernbert_train.batch import Batch
from modernbert_train.models.attention import varlen


def first_predictions(batch: Batch, count: int) -> Batch:
    """The microbatch with so many predictions alone."""
    positions_M, labels_M = (batch.targets[name][:count] for name in ("positions_M", "labels_M"))
    kept = mlm_batch(batch.packed, positions_M, labels_M, num_tokens=batch.num_tokens, num_rows=batch.num_rows)
    assert kept.counts["mlm"] == count
    return kept


def opaque_attention() -> SimpleNamespace:
    """A kernel that a compiler cannot trace, like GPU kernels: sums instead of attention, and real layouts."""

    @torch.library.custom_op("test_training::attend", mutates_args=())
    def attend(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, side: int) -> Tensor:
        return q + k + v

    @torch.library.custom_op("test_training::attend_backward", mutates_args=())
    def attend_backward(grad: Tensor) -> Tensor:
        return grad.clone()

    attend.register_fake(lambda q, *_: torch.empty_like(q))
    attend_backward.register_fake(torch.empty_like)
    attend.register_autograd(lambda ctx, grad: (*(attend_backward(grad) for _ in range(3)), None, None, None))

    def call(q: Tensor, k: Tensor, v: Tensor, layout: varlen.Layout, window: bool) -> Tensor:
        side, _ = layout.visible.sides(window)
        return attend(q, k, v, layout.cu_seqlens_S, layout.longest, side)  # type: ignore[no-any-return]

    return SimpleNamespace(prepare=varlen.prepare, attend=call)
