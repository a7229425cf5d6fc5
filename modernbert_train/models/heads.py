"""The masked-LM head's transform, and the loss in two forms: from logits, and without ever holding all of them.

Logits are the largest tensor of a step by far: 6 GB in bf16, with their gradient, for the masked 30 % of 98,304 tokens.
`ChunkedLoss` makes some of them at a time, takes loss and gradient from them at once, and forgets them. It computes
nothing twice. The plain form is its meaning, which tests hold it against; it serves where logits are wanted.
Small chunks make its matrix products slow, so chunks are large, see `ModelConfig.logit_chunk`; `benchmarks/kernels.py`
compares sizes.

Shape legend: M predicted positions (padded), C positions of a chunk, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from modernbert_train.batch import IGNORED_LABEL
from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.models.layers import compute_dtype, layer_norm


class PredictionHead(nn.Module):
    """norm(gelu(dense(h))), without biases; the decoder that follows is tied to the embedding."""

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.norm = layer_norm(config)

    def forward(self, hidden_MD: Tensor) -> Tensor:
        return self.norm(F.gelu(self.dense(hidden_MD)))


def masked_lm_loss_sum(logits_MV: Tensor, labels_M: Tensor, z_loss: float) -> Tensor:
    """Sum over the labels that are not IGNORED_LABEL of cross-entropy + z_loss * logsumexp^2, in fp32.

    A sum, so that the caller divides by a count known on the host, and no label at all gives 0 and not 0/0.
    Source of the z-loss: PaLM, arXiv:2204.02311, section 5.
    """
    logits_MV = logits_MV.float()
    total = F.cross_entropy(logits_MV, labels_M, ignore_index=IGNORED_LABEL, reduction="sum")
    if z_loss:
        squared_M = logits_MV.logsumexp(dim=-1).square()
        total = total + z_loss * squared_M.masked_fill(labels_M == IGNORED_LABEL, 0.0).sum()
    return total


def loss_and_gradient(logits_CV: Tensor, labels_C: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """`masked_lm_loss_sum` and its gradient with respect to the logits, whose memory is used up.

    Returns:
        loss: fp32 scalar.
        gradient_CV: softmax * (1 + 2 z_loss logsumexp) - [label], 0 where no label is; in the logits' precision, each
            entry rounded once.
    """
    own_dtype, real_C = logits_CV.dtype, labels_C != IGNORED_LABEL
    logits_CV = logits_CV.float()
    column_C = labels_C.clamp(min=0)
    label_logit_C = logits_CV.gather(1, column_C.unsqueeze(1)).squeeze(1)
    highest_C1 = logits_CV.amax(dim=-1, keepdim=True)
    exp_CV = logits_CV.sub_(highest_C1).exp_()
    sum_C = exp_CV.sum(dim=-1)
    partition_C = sum_C.log() + highest_C1.squeeze(1)  # log-sum-exp
    loss_C = partition_C - label_logit_C + z_loss * partition_C.square()
    factor_C = torch.where(real_C, 1 + 2 * z_loss * partition_C, 0.0)
    at_label_C = torch.where(real_C, factor_C * (label_logit_C - partition_C).exp() - 1, 0.0)
    gradient_CV = exp_CV.mul_((factor_C / sum_C).unsqueeze(1)).to(own_dtype)
    line_C = torch.arange(len(labels_C), device=labels_C.device)
    gradient_CV[line_C, column_C] = at_label_C.to(own_dtype)
    return torch.where(real_C, loss_C, 0.0).sum(), gradient_CV


class ChunkedLoss(torch.autograd.Function):
    """`masked_lm_loss_sum` of the decoder's logits; its gradients are made in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor,
        labels_M: Tensor,
        z_loss: float,
        chunk_positions: int,
        step: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Apply to the head's output and the decoder's weights; products are computed in autocast's precision.

        Args:
            ctx: autograd's.
            hidden_MD, weight_VD, bias_V: of the decoder; weights in fp32.
            labels_M: IGNORED_LABEL where nothing is predicted.
            z_loss: see `masked_lm_loss_sum`.
            chunk_positions: C; see `ModelConfig.logit_chunk`.
            step: `loss_and_gradient`, or the same compiled.

        Returns:
            The fp32 sum.
        """
        dtype = compute_dtype(hidden_MD)
        loss = torch.zeros((), dtype=torch.float32, device=hidden_MD.device)
        hidden_grad_MD = torch.empty_like(hidden_MD)
        weight_grad_VD, bias_grad_V = torch.zeros_like(weight_VD), torch.zeros_like(bias_V)
        # cast once, here: then autocast has nothing left to do
        hidden, weight, bias = hidden_MD.to(dtype), weight_VD.to(dtype), bias_V.to(dtype)
        for first in range(0, len(labels_M), chunk_positions):
            chunk = slice(first, first + chunk_positions)
            chunk_loss, gradient_CV = step(F.linear(hidden[chunk], weight, bias), labels_M[chunk], z_loss)
            loss += chunk_loss
            hidden_grad_MD[chunk] = gradient_CV @ weight
            bias_grad_V += gradient_CV.sum(0, dtype=bias_grad_V.dtype)
            if dtype == weight_grad_VD.dtype:
                torch.addmm(weight_grad_VD, gradient_CV.t(), hidden[chunk], out=weight_grad_VD)
            else:
                weight_grad_VD += gradient_CV.t() @ hidden[chunk]
        ctx.save_for_backward(hidden_grad_MD, weight_grad_VD, bias_grad_V)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *(saved * grad for saved in ctx.saved_tensors), None, None, None, None
