"""Encoders in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from benchmarks.batches import lay_out, mlm_batch
from modernbert_train.batch import IGNORED_LABEL, Batch
from modernbert_train.models.attention import varlen
from tests.support.encoders import MODERNBERT, PAD, with_dropout


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


# a narrow ModernBERT with the real pattern of layers; `small(num_layers=4)` is a shallower one
small = partial(replace, with_dropout(MODERNBERT, 0.1), num_layers=7)


def sequences(lengths: Sequence[int], vocab_size: int = 160) -> list[Tensor]:
    """Random token ids above the special ones, one tensor for each length."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(4, vocab_size, (n,), generator=generator) for n in lengths]


def pack(rows: list[list[Tensor]], row_tokens: int, predict_every: int = 3, spare: int = 4) -> Batch:
    """Lay rows of sequences end to end, as the loader does: each tail a sequence of pads, boundaries padded with T."""
    chunks: list[Tensor] = []
    predicted: list[int] = []
    start = 0
    for row in rows:
        tail = row_tokens - sum(len(ids) for ids in row)
        assert tail >= 0
        for ids in row:
            predicted += range(start, start + len(ids), predict_every) if predict_every else ()
            start += len(ids)
            chunks.append(ids)
        if tail:
            chunks.append(torch.full((tail,), PAD))
            start += tail
    ids_T = torch.cat(chunks)
    lengths = [len(chunk) for chunk in chunks]
    boundaries = [0, *torch.tensor(lengths).cumsum(0).tolist(), *[len(ids_T)] * spare]
    positions = torch.tensor(predicted + [0] * spare, dtype=torch.int64)
    labels = ids_T[positions]
    labels[len(predicted) :] = IGNORED_LABEL
    return mlm_batch(
        lay_out(ids_T, boundaries, row_tokens),
        positions,
        labels,
        num_tokens=sum(len(ids) for row in rows for ids in row),
        num_rows=len(rows),
    )
