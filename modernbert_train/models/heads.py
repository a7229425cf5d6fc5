"""The masked-LM head's transform, and the loss in two forms: from full logits, and chunk by chunk.

Logits are the largest tensor of a step by far: 6 GB in bf16, with their gradient, for the masked 30 % of 98,304 tokens.
`ChunkedLoss` computes one chunk of logits at a time, takes loss and gradient from it, and frees it. Nothing is computed
twice. The full form is the reference in tests, and is used where logits are needed. Small chunks make the matrix
products slow, so chunks are large, see `ComputeConfig.logits_at_once`; `benchmarks/kernels.py` compares sizes.

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
from modernbert_train.models.casts import Linear
from modernbert_train.models.layers import compute_dtype


class PredictionHead(nn.Module):
    """norm(gelu(dense(h))); the decoder that follows is tied to the embedding.

    Args:
        config: the encoder's.
        width: E, of the output; None: the encoder's.
        bias: True if both have a bias, as in BERT; ModernBERT's have none.
        approximate: torch's name of the GELU approximation.
    """

    def __init__(self, config: Any, width: int | None = None, *, bias: bool = False, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate
        self.dense = Linear(config.hidden_size, width or config.hidden_size, bias=bias)
        self.norm = nn.LayerNorm(width or config.hidden_size, eps=config.norm_eps, bias=bias)

    def forward(self, hidden_MD: Tensor) -> Tensor:
        return self.norm(F.gelu(self.dense(hidden_MD), approximate=self.approximate))


def masked_lm_loss_sum(logits_MV: Tensor, labels_M: Tensor, z_loss: float, weights_M: Tensor | None = None) -> Tensor:
    """Return the sum over real labels of cross-entropy + z_loss * logsumexp^2, in fp32, each times its weight if given.

    IGNORED_LABEL is skipped. It is a sum, so that the caller divides by a count known on the host, and a microbatch
    without labels gives 0, not 0/0. Source of the z-loss: PaLM, arXiv:2204.02311, section 5.
    """
    logits_MV = logits_MV.float()
    if weights_M is not None:
        loss_M = F.cross_entropy(logits_MV, labels_M, ignore_index=IGNORED_LABEL, reduction="none")
        squared_M = logits_MV.logsumexp(dim=-1).square().masked_fill(labels_M == IGNORED_LABEL, 0.0)
        return ((loss_M + z_loss * squared_M) * weights_M).sum()
    total = F.cross_entropy(logits_MV, labels_M, ignore_index=IGNORED_LABEL, reduction="sum")
    if z_loss:
        squared_M = logits_MV.logsumexp(dim=-1).square()
        total = total + z_loss * squared_M.masked_fill(labels_M == IGNORED_LABEL, 0.0).sum()
    return total


_DRAWS = 1 << 31  # a draw is an integer below this
_UNIT = 1 << 40  # weight 1 as an integer: integer sums are exact in any order
_BLOCK = 256


def sample(weights_CV: Tensor, draws_C: Tensor) -> Tensor:
    """Draw one token for each line, with probability proportional to its weight, without a host sync.

    Inverts the distribution function at (draw + 1/2) / 2^31, first among sums of blocks and then within one, so that no
    tensor as large as the weights is allocated. Sums over blocks are integers: fp32 sums over a whole vocabulary err by
    more than the weight of a rare token, and in no fixed order on a GPU.

    Args:
        weights_CV: fp32, from 0 to 1, such as the exponentials of logits minus the highest; a line of zeros yields an
            arbitrary token.
        draws_C: integers from 0 to 2^31 - 1.

    Returns:
        ids_C.
    """
    size = weights_CV.shape[1]
    in_blocks = size // _BLOCK * _BLOCK
    sums_CB = weights_CV[:, :in_blocks].unflatten(1, (-1, _BLOCK)).sum(dim=-1)
    sums_CB = torch.cat([sums_CB, weights_CV[:, in_blocks:].sum(dim=-1, keepdim=True)], dim=1).mul(_UNIT).long()
    up_to_CB = sums_CB.cumsum(dim=1)
    total_C = up_to_CB[:, -1]
    aim_C = ((draws_C.double() + 0.5) / _DRAWS * total_C.double()).long()
    aim_C1 = torch.minimum(aim_C, total_C - 1).clamp(min=0).unsqueeze(1)
    block_C1 = (up_to_CB <= aim_C1).sum(dim=1, keepdim=True).clamp(max=sums_CB.shape[1] - 1)
    before_C1 = (up_to_CB - sums_CB).gather(1, block_C1)
    ids_CI = block_C1 * _BLOCK + torch.arange(_BLOCK, device=weights_CV.device)
    inside_CI = weights_CV.gather(1, ids_CI.clamp(max=size - 1)).masked_fill(ids_CI >= size, 0.0)
    up_to_CI = inside_CI.mul(_UNIT).long().cumsum(dim=1)
    # rounding in the block's sum must not lead beyond its last token
    rest_C1 = torch.minimum(aim_C1 - before_C1, up_to_CI[:, -1:] - 1).clamp(min=0)
    found_C1 = (up_to_CI <= rest_C1).sum(dim=1, keepdim=True).clamp(max=_BLOCK - 1)
    return ids_CI.gather(1, found_C1).squeeze(1).clamp(max=size - 1)


def loss_and_gradient(
    logits_CV: Tensor,
    labels_C: Tensor,
    z_loss: float,
    draws_C: Tensor | None = None,
    weights_C: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return `masked_lm_loss_sum` and its gradient by the logits; overwrites the logits' memory.

    Returns:
        loss: fp32 scalar.
        gradient_CV: (softmax * (1 + 2 z_loss logsumexp) - [label]) times the weight, 0 without a label; in the logits'
            precision, each entry rounded once.
        ids_C: drawn from the softmax by draws_C; None without.
    """
    own_dtype, real_C = logits_CV.dtype, labels_C != IGNORED_LABEL
    logits_CV = logits_CV.float()
    column_C = labels_C.clamp(min=0)
    label_logit_C = logits_CV.gather(1, column_C.unsqueeze(1)).squeeze(1)
    highest_C1 = logits_CV.amax(dim=-1, keepdim=True)
    exp_CV = logits_CV.sub_(highest_C1).exp_()
    ids_C = None if draws_C is None else sample(exp_CV, draws_C)
    sum_C = exp_CV.sum(dim=-1)
    partition_C = sum_C.log() + highest_C1.squeeze(1)  # log-sum-exp
    loss_C = partition_C - label_logit_C + z_loss * partition_C.square()
    factor_C = torch.where(real_C, 1 + 2 * z_loss * partition_C, 0.0)
    at_label_C = torch.where(real_C, factor_C * (label_logit_C - partition_C).exp() - 1, 0.0)
    if weights_C is not None:
        loss_C, factor_C, at_label_C = loss_C * weights_C, factor_C * weights_C, at_label_C * weights_C
    gradient_CV = exp_CV.mul_((factor_C / sum_C).unsqueeze(1)).to(own_dtype)
    line_C = torch.arange(len(labels_C), device=labels_C.device)
    gradient_CV[line_C, column_C] = at_label_C.to(own_dtype)
    return torch.where(real_C, loss_C, 0.0).sum(), gradient_CV, ids_C


class ChunkedLoss(torch.autograd.Function):
    """`masked_lm_loss_sum` of the decoder's logits; computes its gradients in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_M: Tensor,
        draws_M: Tensor | None,
        z_loss: float,
        chunk_positions: int,
        step: Callable[[Tensor, Tensor, float, Tensor | None, Tensor | None], tuple[Tensor, Tensor, Tensor | None]],
        cast_VD: Tensor | None = None,
        weights_M: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Apply to the head's output and the decoder's weights; products are computed in autocast's precision.

        Args:
            ctx: autograd's.
            hidden_MD, weight_VD, bias_V: of the decoder; weights in fp32, the bias may be None.
            labels_M: IGNORED_LABEL where nothing is predicted.
            draws_M: see `sample`; None: nothing is drawn.
            z_loss: see `masked_lm_loss_sum`.
            chunk_positions: C; see `ComputeConfig.logit_chunk`.
            step: `loss_and_gradient`, or its compiled form.
            cast_VD: the weight in autocast's precision, if it was cast before.
            weights_M: fp32, of the predictions; None: all are 1.

        Returns:
            The fp32 sum, and the drawn ids, through which no gradient flows.
        """
        dtype = compute_dtype(hidden_MD)
        loss = torch.zeros((), dtype=torch.float32, device=hidden_MD.device)
        hidden_grad_MD = torch.empty_like(hidden_MD)
        weight_grad_VD = torch.zeros_like(weight_VD)
        bias_grad_V = None if bias_V is None else torch.zeros_like(bias_V)
        # cast once, here; autocast then leaves the products alone
        weight = weight_VD.to(dtype) if cast_VD is None else cast_VD
        hidden, bias = hidden_MD.to(dtype), None if bias_V is None else bias_V.to(dtype)
        ids_M = None if draws_M is None else torch.empty_like(labels_M)
        for first in range(0, len(labels_M), chunk_positions):
            chunk = slice(first, first + chunk_positions)
            draws_C = None if draws_M is None else draws_M[chunk]
            weights_C = None if weights_M is None else weights_M[chunk]
            # no name for the logits here, nor a tuple of arguments (*), so that step can free them
            chunk_loss, gradient_CV, ids_C = step(
                F.linear(hidden[chunk], weight, bias), labels_M[chunk], z_loss, draws_C, weights_C
            )
            loss += chunk_loss
            if ids_M is not None and ids_C is not None:
                ids_M[chunk] = ids_C
            hidden_grad_MD[chunk] = gradient_CV @ weight
            if bias_grad_V is not None:
                bias_grad_V += gradient_CV.sum(0, dtype=bias_grad_V.dtype)
            if dtype == weight_grad_VD.dtype:
                torch.addmm(weight_grad_VD, gradient_CV.t(), hidden[chunk], out=weight_grad_VD)
            else:
                weight_grad_VD += gradient_CV.t() @ hidden[chunk]
            del gradient_CV  # free it before the next chunk's is computed
        ctx.save_for_backward(hidden_grad_MD, weight_grad_VD, bias_grad_V)
        if ids_M is not None:
            ctx.mark_non_differentiable(ids_M)
        return loss, ids_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grads = (None if saved is None else saved * grad for saved in ctx.saved_tensors)
        return *grads, None, None, None, None, None, None, None
