"""Inputs of attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.batches import lay_out
from modernbert_train.batch import QUERY_RANK, Order, Packed
from modernbert_train.models.attention.visible import Visible
from tests.support.encoders import ALBERT


def packed(lengths: list[int], spare: int = 3) -> Packed:
    total = sum(lengths)
    boundaries = [0, *torch.tensor(lengths).cumsum(0).tolist(), *[total] * spare]
    return lay_out(torch.zeros(total, dtype=torch.int64), boundaries)


def given(lengths: list[int], spare: int = 3) -> Packed:
    """Ranks and limits as an objective may give them: some tokens seen by all, some by some, some by none; the first of
    each sequence sees nothing. Positions are not those in the buffer."""
    line, generator = packed(lengths, spare), torch.Generator().manual_seed(len(lengths))
    ranks_T = torch.randint(-1, 6, (sum(lengths),), generator=generator)
    ranks_T[3::7] = QUERY_RANK
    limits_T = torch.randint(0, 8, (sum(lengths),), generator=generator)
    limits_T[line.cu_seqlens_S[:-1].unique().long().clamp(max=sum(lengths) - 1)] = -1
    positions_T = line.position_ids_T.flip(0) // 2
    return replace(line, order="given", ranks_T=ranks_T, limits_T=limits_T, position_ids_T=positions_T)


def line_of(lengths: list[int], order: Order, spare: int = 3) -> Packed:
    return given(lengths, spare) if order == "given" else replace(packed(lengths, spare), order=order)


def seen(line: Packed, window: tuple[int, int] | None = None) -> Tensor:
    """Which key (column) each query (row) sees, token by token; `window` is how far before and after itself."""
    lengths_S = line.cu_seqlens_S.diff()
    sequence_T = torch.arange(len(lengths_S)).repeat_interleave(lengths_S)
    back_TT = line.position_ids_T[:, None] - line.position_ids_T  # how far before its query a key stands
    seen_TT = sequence_T[:, None] == sequence_T
    if window is not None:
        seen_TT &= (back_TT <= window[0]) & (-back_TT <= window[1])
    if line.ranks_T is not None and line.limits_T is not None:
        seen_TT &= line.ranks_T < line.limits_T[:, None]
    return seen_TT & (back_TT >= 0) if line.order == "causal" else seen_TT


def dense(qkv_T3NH: Tensor, seen_TT: Tensor, bias_NTT: Tensor | float = 0.0) -> Tensor:
    """Attention written out over a full T x T mask; a token that sees nothing gets zeros."""
    q_TNH, k_TNH, v_TNH = qkv_T3NH.unbind(1)
    scores_NTT = torch.einsum("qnh,knh->nqk", q_TNH, k_TNH) * q_TNH.shape[-1] ** -0.5 + bias_NTT
    blind_T1 = ~seen_TT.any(1, keepdim=True)
    shares_NTT = scores_NTT.masked_fill(~(seen_TT | blind_T1), -torch.inf).softmax(-1)
    return torch.einsum("nqk,knh->qnh", shares_NTT, v_TNH).masked_fill(blind_T1[..., None], 0.0)


def inputs(tokens: int, width: int) -> tuple[Tensor, Tensor]:
    """Return q, k and v of two heads, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tokens, 3, 2, width, generator=generator), torch.randn(tokens, 2, width, generator=generator)


def computed(
    kernel: Any, qkv_T3NH: Tensor, grad_TNH: Tensor, line: Packed, visible: Visible, window: bool
) -> tuple[Tensor, Tensor]:
    """Return a kernel's output and the gradient of q, k and v."""
    own_T3NH = qkv_T3NH.detach().clone().requires_grad_()
    out_TNH = kernel.attend(*own_T3NH.unbind(1), kernel.prepare(line, visible), window)
    return out_TNH.detach(), torch.autograd.grad(out_TNH, own_T3NH, grad_TNH)[0]


def scores_of(q_TNH: Tensor, k_TNH: Tensor, ends: Tensor, before: int | None, after: int | None) -> Tensor:
    """Return scores_NTT of the sequences that end there, -inf where a token does not see; None: it sees all."""
    window = (len(q_TNH) if before is None else before, len(q_TNH) if after is None else after)
    seen_TT = seen(lay_out(torch.arange(len(q_TNH)), ends), window)
    scores_NTT = torch.einsum("qnh,knh->nqk", q_TNH.float(), k_TNH.float()) * q_TNH.shape[-1] ** -0.5
    return scores_NTT.masked_fill(~seen_TT, -torch.inf)


def plain_forward(scores_NTT: Tensor, v_TNH: Tensor) -> tuple[Tensor, Tensor]:
    """Return the results and the log-sum-exp, as a flash kernel does."""
    out_TNH = torch.einsum("nqk,knh->qnh", scores_NTT.softmax(-1), v_TNH.float())
    return out_TNH.to(v_TNH.dtype).contiguous(), scores_NTT.logsumexp(-1)


def plain_gradients(
    scores_NTT: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v from the saved results and log-sum-exp, whose errors then show."""
    q, k, v, out, grad = (each.float() for each in (q, k, v, out, grad))
    shares_NTT = (scores_NTT - lse[..., None]).exp()
    slopes_NTT = torch.einsum("qnh,knh->nqk", grad, v) - (out * grad).sum(-1).T[..., None]
    slopes_NTT = slopes_NTT * shares_NTT * q.shape[-1] ** -0.5
    of_q, of_k = torch.einsum("nqk,knh->qnh", slopes_NTT, k), torch.einsum("nqk,qnh->knh", slopes_NTT, q)
    return of_q.contiguous(), of_k.contiguous(), torch.einsum("nqk,qnh->knh", shares_NTT, grad).contiguous()


WAYS = {
    "all": ALBERT,
    "exact gelu": replace(ALBERT, activation="gelu"),
    "groups": replace(ALBERT, groups=2),
    "turns": replace(ALBERT, group_layers=2),
    "groups and turns": replace(ALBERT, groups=2, group_layers=2, num_layers=8),
    "attention": replace(ALBERT, sharing="attention"),
    "ffn": replace(ALBERT, sharing="ffn"),
    "ffn in groups": replace(ALBERT, sharing="ffn", groups=2),
    "none": replace(ALBERT, sharing="none"),
}
