"""Clip a gradient whose norm is known."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from modernbert_train.optim.stable_adamw import local

_TINY = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], norm: float, max_norm: float) -> None:
    """Scale gradients in place, sharded or whole, so that their norm is at most `max_norm`.

    Args:
        parameters: those without a gradient are skipped.
        norm: of the whole gradient, over all ranks. If it is NaN, all gradients become NaN, as in torch.
        max_norm: above 0.
    """
    share = max_norm / (norm + _TINY)
    if share >= 1:
        return
    grads = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(grads, share)
