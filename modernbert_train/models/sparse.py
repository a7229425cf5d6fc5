"""Sparse vectors of texts (SPLADE, arXiv 2205.04733): log(1 + relu(logit)), the maximum over the tokens of each text.

Logits of all tokens would be larger than everything else in training, so they exist for some columns of the vocabulary
at a time. Only the maximum and its token are kept; the backward pass rebuilds the gradient from them, again in parts.
A token is of one text, so no entry of a gradient is a sum of several texts and no sum depends on an order.

Shape legend: T packed tokens, S segments of the buffer, N texts, V vocabulary, C its columns at a time, E width of the
decoder's input.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from modernbert_train.models.layers import compute_dtype


class SparseVectors(torch.autograd.Function):
    """The vectors of texts from the decoder's input and its weights."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TE: Tensor,
        weight_VE: Tensor,
        bias_V: Tensor | None,
        boundaries_S: Tensor,
        firsts_N: Tensor,
        columns: int,
        cast_VE: Tensor | None = None,
    ) -> Tensor:
        """Apply to the head's output; products are computed in autocast's precision.

        Args:
            ctx: autograd's.
            hidden_TE, weight_VE, bias_V: of the decoder; weights in fp32, the bias may be None.
            boundaries_S: of the segments, from 0 to T; see `Packed.cu_seqlens_S`.
            firsts_N: first token of each text; a text is a segment.
            columns: C.
            cast_VE: the weight in autocast's precision, if it was cast before.

        Returns:
            vectors_NV in fp32.
        """
        dtype, num_tokens = compute_dtype(hidden_TE), len(hidden_TE)
        hidden, weight = hidden_TE.to(dtype), weight_VE.to(dtype) if cast_VE is None else cast_VE
        lengths_S = boundaries_S.diff().long()
        segments = torch.arange(len(lengths_S), device=hidden.device)
        segment_T = segments.repeat_interleave(lengths_S, output_size=num_tokens)
        segment_N, token_T1 = segment_T[firsts_N], torch.arange(num_tokens, device=hidden.device).unsqueeze(1)
        vectors_NV = hidden.new_empty(len(firsts_N), len(weight), dtype=torch.float32)
        token_NV = torch.empty_like(vectors_NV, dtype=torch.int32)
        for first in range(0, len(weight), columns):
            part = slice(first, first + columns)
            logits_TC = F.linear(hidden, weight[part], None if bias_V is None else bias_V[part].to(dtype)).float()
            highest_SC = _reduce(logits_TC, "max", lengths_S, 0.0)  # the initial value is the relu
            vectors_NV[:, part] = highest_SC[segment_N].log1p()
            is_highest_TC = logits_TC == highest_SC[segment_T]
            del logits_TC
            # fp32 counts tokens exactly up to 2^24; of equal logits the first token's
            place_TC = torch.where(is_highest_TC, token_T1.float(), float(num_tokens))
            place_NC = _reduce(place_TC, "min", lengths_S, float(num_tokens))[segment_N]
            token_NV[:, part] = place_NC.where(place_NC < num_tokens, firsts_N.unsqueeze(1).float())
        ctx.save_for_backward(hidden, weight, vectors_NV, token_NV)
        ctx.columns, ctx.dtypes, ctx.has_bias = columns, (hidden_TE.dtype, weight_VE.dtype), bias_V is not None
        return vectors_NV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NV: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, vectors_NV, token_NV = ctx.saved_tensors
        of_hidden, of_weight = (torch.zeros_like(each, dtype=torch.float32) for each in (hidden, weight))
        of_bias_V = weight.new_zeros(len(weight), dtype=torch.float32)
        for first in range(0, len(weight), ctx.columns):
            part = slice(first, first + ctx.columns)
            slope_NC = (grad_NV[:, part] * (-vectors_NV[:, part]).exp()).masked_fill(vectors_NV[:, part] <= 0, 0.0)
            of_bias_V[part] = slope_NC.sum(0)
            of_logits_TC = hidden.new_zeros(len(hidden), slope_NC.shape[1])
            of_logits_TC.scatter_(0, token_NV[:, part].long(), slope_NC.to(hidden.dtype))
            of_hidden += of_logits_TC @ weight[part]
            of_weight[part] = of_logits_TC.T @ hidden
        hidden_dtype, weight_dtype = ctx.dtypes
        of_bias = of_bias_V if ctx.has_bias else None
        return of_hidden.to(hidden_dtype), of_weight.to(weight_dtype), of_bias, None, None, None, None


def _reduce(values_TC: Tensor, how: str, lengths_S: Tensor, initial: float) -> Tensor:
    """Reduce the tokens of each segment, [S, C]."""
    return torch.segment_reduce(values_TC, how, lengths=lengths_S, axis=0, unsafe=True, initial=initial)
