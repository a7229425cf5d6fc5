"""Gradients of a step's microbatches meet once where that costs no memory; everything else is left to the wrappers.

DDP: Composer synchronises with the last microbatch only, bucket by bucket while it goes backward; for the wrapper see
`replicate` in composer_internals.py.

HSDP: each microbatch must reduce-scatter, or whole gradients would pile up. The sum over copies can wait for the last,
because what waits is a shard. FSDP2 by itself does both with every microbatch.
"""

from __future__ import annotations

from composer.core import Callback, State
from composer.loggers import Logger
from torch.distributed.fsdp import FSDPModule

from modernbert_train.config.schema import RunConfig
from modernbert_train.train.adapters import inner_model, is_sharded


def accumulation(config: RunConfig, num_ranks: int) -> list[Callback]:
    """The callbacks that a run needs for what the head of this file says."""
    return [ReduceCopiesOnce()] if is_sharded(config, num_ranks) and config.distributed.strategy == "hsdp" else []


class ReduceCopiesOnce(Callback):
    """HSDP: lets the copies of the weights sum their gradients with the last microbatch of a step only."""

    def __init__(self) -> None:
        self._left = 0  # microbatches of the step that have not gone backward

    def before_train_batch(self, state: State, logger: Logger) -> None:
        self._left = len(state.batch.microbatches)

    def before_backward(self, state: State, logger: Logger) -> None:
        self._left -= 1
        model = inner_model(state.model)
        assert isinstance(model, FSDPModule)
        model.set_requires_all_reduce(self._left == 0)
