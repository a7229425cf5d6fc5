"""Attention alone, forward and backward: every kernel of a device, compared with torch's own on padded documents.

Documents have log-normal lengths, cut at a row's length, and are concatenated in one buffer.
The floor counts the visible pairs of tokens: 4 H N FLOPs for each in the forward pass (scores, and the weighted sum of
values) and 2.5 times that in the backward pass, which computes the scores again.

Shape legend: T packed tokens, N heads, H head width, S documents of a padded batch, L its longest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.batches import lay_out
from benchmarks.measure import Case, Group, Stage, Unusable, Work
from modernbert_train.batch import Packed
from modernbert_train.models.attention import KERNELS, Kernel, flash
from modernbert_train.models.attention.visible import Visible
from modernbert_train.plan.flops import mean_keys

HEAD_SIZE = 64
BACKWARD = 2.5


@dataclass(frozen=True)
class Sizes:
    """Sizes of the attention benchmark.

    Attributes:
        tokens: in one buffer.
        documents: median and greatest length of documents; one group for each pair.
        heads: numbers of heads; one group for each.
        half_window: of local layers.
        padded_documents: in a batch of the padded form.
    """

    tokens: int
    documents: tuple[tuple[int, int], ...]
    heads: tuple[int, ...]
    half_window: int
    padded_documents: int


def draw_lengths(tokens: int, median: int, longest: int) -> list[int]:
    """Draw lengths of documents that fill a buffer exactly; the last one is cut."""
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    while (room := tokens - sum(lengths)) > 0:
        lengths.append(min(room, int(np.clip(rng.lognormal(np.log(median), 0.8), 8, longest))))
    return lengths


def line_of(lengths: list[int], longest: int, device: torch.device) -> Packed:
    """Return the documents concatenated."""
    total = sum(lengths)
    spare = -len(lengths) % 64
    boundaries = [0, *np.cumsum(lengths).tolist(), *[total] * spare]
    return lay_out(torch.zeros(total, dtype=torch.int64), boundaries, longest).to(device)


def attention_flops(lengths: list[int], half_window: int | None, heads: int) -> float:
    """Return the FLOPs of the forward pass over these documents; without a window all pairs of a document count."""
    keys = mean_keys(lengths, half_window)
    return 4.0 * HEAD_SIZE * heads * keys * sum(lengths)


def work_of(sizes: Sizes, lengths: list[int], window: bool, heads: int, itemsize: int) -> tuple[Work, Work]:
    """Return the work of the forward and the backward pass; each tensor is moved once."""
    flops = attention_flops(lengths, sizes.half_window if window else None, heads)
    tensor = float(sizes.tokens * heads * HEAD_SIZE * itemsize)
    return (
        Work(flops, 4 * tensor, sizes.tokens),  # q, k and v; their output
        Work(BACKWARD * flops, 8 * tensor, sizes.tokens),  # these four and a gradient of each
    )


def attention_groups(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Group]:
    """Yield a group for each number of heads, kind of documents and kind of layer; its cases get the same buffer."""
    for heads in sizes.heads:
        for median, longest in sizes.documents:
            lengths = draw_lengths(sizes.tokens, median, longest)
            line = line_of(lengths, longest, device)
            q, k, v, grad = (torch.randn(sizes.tokens, heads, HEAD_SIZE, device=device).to(dtype) for _ in range(4))
            qkv = [tensor.requires_grad_() for tensor in (q, k, v)]
            for window in (False, True):
                work = work_of(sizes, lengths, window, heads, dtype.itemsize)
                cases = [
                    Case(name, partial(_packed, kernel, line, qkv, grad, window, sizes, work))
                    for name, kernel in KERNELS.items()
                ]
                cases.append(Case("torch, padded", partial(_padded, lengths, qkv, grad, window, sizes, work)))
                kind = "local" if window else "global"
                of = f"{len(lengths)} documents of median {np.median(lengths):,.0f} and at most {max(lengths):,} tokens"
                yield Group(f"attention, {kind}, {heads} heads, {of}", cases)


def _packed(
    kernel: Kernel, line: Packed, qkv: list[Tensor], grad: Tensor, window: bool, sizes: Sizes, work: tuple[Work, Work]
) -> list[Stage]:
    if (reason := kernel.support(grad.device, grad.dtype)) is not None:
        raise Unusable(reason)
    flash.switch_back()  # `varlen` is torch's own, regardless of earlier cases
    q, k, v = qkv
    return [
        Stage("prepare", lambda _: kernel.prepare(line, Visible.around(sizes.half_window))),
        Stage("forward", lambda layout: kernel.attend(q, k, v, layout, window), work[0]),
        Stage("backward", lambda out: torch.autograd.grad(out, qkv, grad), work[1]),
    ]


def _padded(
    lengths: list[int], qkv: list[Tensor], grad: Tensor, window: bool, sizes: Sizes, work: tuple[Work, Work]
) -> list[Stage]:
    """Time scaled_dot_product_attention as most people use it: documents in batches, padded, with a mask."""
    size = sizes.padded_documents
    documents_of = [tensor.detach().split(lengths) for tensor in (*qkv, grad)]
    inputs: list[list[Tensor]] = []
    masks, grads = [], []
    for first in range(0, len(lengths), size):
        *some, out_grad = (
            pad_sequence(list(documents[first : first + size]), batch_first=True).transpose(1, 2).contiguous()
            for documents in documents_of
        )
        inputs.append([tensor.requires_grad_() for tensor in some])
        grads.append(out_grad)
        place_L = torch.arange(out_grad.shape[2], device=grad.device)
        length_S = torch.tensor(lengths[first : first + size], device=grad.device)
        masks.append(place_L < length_S[:, None, None, None])
        if window:
            near_LL = (place_L[:, None] - place_L).abs() <= sizes.half_window
            alone_LL = place_L[:, None] == place_L  # a pad sees itself, or its row would be NaN
            masks[-1] = (masks[-1] & near_LL) | alone_LL

    def forward(_: object) -> list[Tensor]:
        return [
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            for (q, k, v), mask in zip(inputs, masks, strict=True)
        ]

    def backward(outs: list[Tensor]) -> object:
        return torch.autograd.grad(outs, [tensor for qkv in inputs for tensor in qkv], grads)

    return [Stage("forward", forward, work[0]), Stage("backward", backward, work[1])]
