"""Attention within a window in Triton, in tiles of 64 tokens of the packed line; two passes backward, without atomics.

A window of 64 tokens on each side lies in three tiles of keys, 192 tokens, wherever a query's own tile stands; tiles of
128, as FlashAttention has them, take 352 to 384. Tiles are cut from the line and not from each sequence, so that no
block of the grid is empty; which keys belong to a query's sequence is asked of each pair. Backward each pass computes
the scores again: one for keys and values, one for queries, each result is written by one program, and a step gives the
same bits every time.

Shape legend: T packed tokens, N heads, H head width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64
LN_2 = tl.constexpr(math.log(2))


@triton.jit
def _load(base, line, stride, num_tokens, WIDTH: tl.constexpr):
    """Lines of one head: [lines, WIDTH], zeros beyond the last token."""
    columns = tl.arange(0, WIDTH)
    return tl.load(
        base + line.to(tl.int64)[:, None] * stride + columns[None, :], mask=(line < num_tokens)[:, None], other=0.0
    )


@triton.jit
def _store(base, line, stride, num_tokens, values, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    place = base + line.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(place, values.to(base.dtype.element_ty), mask=(line < num_tokens)[:, None])


@triton.jit
def _forward(
    q_TNH,
    k_TNH,
    v_TNH,
    out_TNH,
    lse_NT,
    first_T,
    end_T,
    num_tokens,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    scale,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Of one tile of queries and one head; `lse` is the logarithm to base 2 of a query's sum."""
    start, head = tl.program_id(0) * TILE, tl.program_id(1)
    query = start + tl.arange(0, TILE)
    q = _load(q_TNH + head * q_head, query, q_token, num_tokens, WIDTH)
    first = tl.load(first_T + query, mask=query < num_tokens, other=num_tokens)
    end = tl.load(end_T + query, mask=query < num_tokens, other=0)
    highest = tl.full((TILE,), -1e30, tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    out = tl.zeros((TILE, WIDTH), tl.float32)
    low = tl.maximum(tl.min(first, 0), start - BEFORE) // TILE * TILE
    for other in range(low, tl.minimum(tl.max(end, 0), start + TILE + AFTER), TILE):
        key = other + tl.arange(0, TILE)
        k = _load(k_TNH + head * k_head, key, k_token, num_tokens, WIDTH)
        v = _load(v_TNH + head * v_head, key, v_token, num_tokens, WIDTH)
        back = query[:, None] - key[None, :]
        seen = (key[None, :] >= first[:, None]) & (key[None, :] < end[:, None]) & (back <= BEFORE) & (-back <= AFTER)
        scores = tl.where(seen, tl.dot(q, tl.trans(k)) * scale, -1e30)
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.where(seen, tl.exp2(scores - higher[:, None]), 0.0)
        kept = tl.exp2(highest - higher)
        total = total * kept + tl.sum(weights, 1)
        out = tl.dot(weights.to(v.dtype), v, out * kept[:, None])
        highest = higher
    inside = query < num_tokens
    total = tl.where(inside, total, 1.0)
    _store(out_TNH + head * WIDTH, query, tl.num_programs(1) * WIDTH, num_tokens, out / total[:, None], WIDTH)
    tl.store(lse_NT + head * num_tokens + query, highest + tl.log2(total), mask=inside)


@triton.jit
def _backward_queries(
    q_TNH,
    k_TNH,
    v_TNH,
    out_TNH,
    grad_TNH,
    dq_TNH,
    lse_NT,
    delta_NT,
    first_T,
    end_T,
    num_tokens,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    grad_token,
    grad_head,
    scale,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """The gradient of one tile of queries; `delta`, the sum of out * grad, is kept for the other pass."""
    start, head = tl.program_id(0) * TILE, tl.program_id(1)
    query = start + tl.arange(0, TILE)
    inside = query < num_tokens
    q = _load(q_TNH + head * q_head, query, q_token, num_tokens, WIDTH)
    grad = _load(grad_TNH + head * grad_head, query, grad_token, num_tokens, WIDTH)
    out = _load(out_TNH + head * WIDTH, query, tl.num_programs(1) * WIDTH, num_tokens, WIDTH)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(delta_NT + head * num_tokens + query, delta, mask=inside)
    lse = tl.load(lse_NT + head * num_tokens + query, mask=inside, other=0.0)
    first = tl.load(first_T + query, mask=inside, other=num_tokens)
    end = tl.load(end_T + query, mask=inside, other=0)
    dq = tl.zeros((TILE, WIDTH), tl.float32)
    low = tl.maximum(tl.min(first, 0), start - BEFORE) // TILE * TILE
    for other in range(low, tl.minimum(tl.max(end, 0), start + TILE + AFTER), TILE):
        key = other + tl.arange(0, TILE)
        k = _load(k_TNH + head * k_head, key, k_token, num_tokens, WIDTH)
        v = _load(v_TNH + head * v_head, key, v_token, num_tokens, WIDTH)
        back = query[:, None] - key[None, :]
        seen = (key[None, :] >= first[:, None]) & (key[None, :] < end[:, None]) & (back <= BEFORE) & (-back <= AFTER)
        weights = tl.where(seen, tl.exp2(tl.dot(q, tl.trans(k)) * scale - lse[:, None]), 0.0)
        moved = weights * (tl.dot(grad, tl.trans(v)) - delta[:, None])
        dq = tl.dot(moved.to(k.dtype), k, dq)
    _store(dq_TNH + head * WIDTH, query, tl.num_programs(1) * WIDTH, num_tokens, dq * scale * LN_2, WIDTH)


@triton.jit
def _backward_keys(
    q_TNH,
    k_TNH,
    v_TNH,
    grad_TNH,
    dk_TNH,
    dv_TNH,
    lse_NT,
    delta_NT,
    first_T,
    end_T,
    num_tokens,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    grad_token,
    grad_head,
    scale,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """The gradients of one tile of keys and values; everything by pairs is [keys, queries]."""
    start, head = tl.program_id(0) * TILE, tl.program_id(1)
    key = start + tl.arange(0, TILE)
    inside = key < num_tokens
    k = _load(k_TNH + head * k_head, key, k_token, num_tokens, WIDTH)
    v = _load(v_TNH + head * v_head, key, v_token, num_tokens, WIDTH)
    first = tl.load(first_T + key, mask=inside, other=num_tokens)
    end = tl.load(end_T + key, mask=inside, other=0)
    dk = tl.zeros((TILE, WIDTH), tl.float32)
    dv = tl.zeros((TILE, WIDTH), tl.float32)
    low = tl.maximum(tl.min(first, 0), start - AFTER) // TILE * TILE
    for other in range(low, tl.minimum(tl.max(end, 0), start + TILE + BEFORE), TILE):
        query = other + tl.arange(0, TILE)
        q = _load(q_TNH + head * q_head, query, q_token, num_tokens, WIDTH)
        grad = _load(grad_TNH + head * grad_head, query, grad_token, num_tokens, WIDTH)
        lse = tl.load(lse_NT + head * num_tokens + query, mask=query < num_tokens, other=0.0)
        delta = tl.load(delta_NT + head * num_tokens + query, mask=query < num_tokens, other=0.0)
        back = query[None, :] - key[:, None]
        seen = (
            (query[None, :] >= first[:, None]) & (query[None, :] < end[:, None]) & (back <= BEFORE) & (-back <= AFTER)
        )
        weights = tl.where(seen, tl.exp2(tl.dot(k, tl.trans(q)) * scale - lse[None, :]), 0.0)
        dv = tl.dot(weights.to(grad.dtype), grad, dv)
        moved = weights * (tl.dot(v, tl.trans(grad)) - delta[None, :])
        dk = tl.dot(moved.to(q.dtype), q, dk)
    token = tl.num_programs(1) * WIDTH
    _store(dk_TNH + head * WIDTH, key, token, num_tokens, dk * scale * LN_2, WIDTH)
    _store(dv_TNH + head * WIDTH, key, token, num_tokens, dv, WIDTH)


def _grid(q_TNH: Tensor) -> tuple[int, int]:
    return triton.cdiv(q_TNH.shape[0], TILE), q_TNH.shape[1]


def _strides(*tensors: Tensor) -> list[int]:
    """Of tokens and heads."""
    return [stride for tensor in tensors for stride in tensor.stride()[:2]]


def forward(
    q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, first_T: Tensor, end_T: Tensor, before: int, after: int
) -> tuple[Tensor, Tensor]:
    """Attention, and lse_NT: of each query and head the logarithm to base 2 of the sum of its exponentials.

    Args:
        q_TNH, k_TNH, v_TNH: in bf16 or fp16, any strides but in the last dimension.
        first_T, end_T: int32, of each token's sequence the first token and the one behind the last.
        before, after: tokens that a token sees on each side.
    """
    tokens, heads, width = q_TNH.shape
    assert all(each.stride(-1) == 1 for each in (q_TNH, k_TNH, v_TNH))
    out_TNH = torch.empty((tokens, heads, width), dtype=q_TNH.dtype, device=q_TNH.device)
    lse_NT = torch.empty((heads, tokens), dtype=torch.float32, device=q_TNH.device)
    _forward[_grid(q_TNH)](
        q_TNH, k_TNH, v_TNH, out_TNH, lse_NT, first_T, end_T, tokens,
        *_strides(q_TNH, k_TNH, v_TNH), width**-0.5 / math.log(2), before, after, width, TILE,
    )  # fmt: skip
    return out_TNH, lse_NT


def backward(
    grad_TNH: Tensor,
    q_TNH: Tensor,
    k_TNH: Tensor,
    v_TNH: Tensor,
    out_TNH: Tensor,
    lse_NT: Tensor,
    first_T: Tensor,
    end_T: Tensor,
    before: int,
    after: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    tokens, _, width = q_TNH.shape
    dq_TNH, dk_TNH, dv_TNH = (torch.empty_like(out_TNH) for _ in range(3))
    delta_NT = torch.empty_like(lse_NT)
    known: list[Any] = [lse_NT, delta_NT, first_T, end_T, tokens, *_strides(q_TNH, k_TNH, v_TNH, grad_TNH)]
    known += [width**-0.5 / math.log(2), before, after, width, TILE]
    _backward_queries[_grid(q_TNH)](q_TNH, k_TNH, v_TNH, out_TNH, grad_TNH, dq_TNH, *known)
    _backward_keys[_grid(q_TNH)](q_TNH, k_TNH, v_TNH, grad_TNH, dk_TNH, dv_TNH, *known)
    return dq_TNH, dk_TNH, dv_TNH
