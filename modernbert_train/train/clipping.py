"""Gradient clipping by the norm of the whole gradient: optim.max_grad_norm, where the optimizer does not bound updates.

The norm is that of the step's numbers, of all parameters and all ranks, which the host has already been told: clipping
needs no other sum, no collective and no wait, and costs nothing in a step whose gradient is short enough.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from torch import nn

from modernbert_train.optim.stable_adamw import local
from modernbert_train.train.step_numbers import CurrentStep

_TINY = 1e-6  # that of torch.nn.utils.clip_grad_norm_


class ClipGradients(Callback):
    """Scales the gradient of a step whose update will be applied.

    Args:
        max_norm: optim.max_grad_norm.
        step: has the norm, and knows whether the guard holds the update back.
    """

    def __init__(self, max_norm: float, step: CurrentStep) -> None:
        self._max_norm = max_norm
        self._step = step

    def after_train_batch(self, state: State, logger: Logger) -> None:
        if not self._step.skipped:
            clip(state.model.parameters(), self._step.numbers.grad_norm, self._max_norm)


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], norm: float, max_norm: float) -> None:
    """Scale gradients in place, sharded or whole, so that their norm is at most `max_norm`.

    Args:
        parameters: those without a gradient are left alone.
        norm: of the whole gradient, over all ranks. If it is no number, no gradient is one afterwards, as in torch.
        max_norm: above 0.
    """
    share = max_norm / (norm + _TINY)
    if share >= 1:
        return
    grads = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(grads, share)
