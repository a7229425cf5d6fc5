"""Gradient clipping by the norm of the whole gradient: optim.max_grad_norm, where the optimizer does not bound updates.

The norm is that of the step's numbers, of all parameters and all ranks, which the host has already been told: clipping
needs no other sum, no collective and no wait, and costs nothing in a step whose gradient is short enough.
"""

from __future__ import annotations

from composer.core import Callback, State
from composer.loggers import Logger

from modernbert_train.optim.clipping import clip
from modernbert_train.train.step_numbers import CurrentStep


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
