"""Gradients of a step's microbatches meet once where that costs no memory; everything else is left to the wrappers.

DDP: Composer synchronises with the last microbatch only, bucket by bucket while it goes backward; its wrapper is
replaced by one whose gradients lie in the buckets themselves, so that they are not copied back after the all-reduce:
8 bytes of memory traffic for each parameter, and after the backward pass the room of a second copy.

HSDP: each microbatch must reduce-scatter, or whole gradients would pile up. The sum over copies can wait for the last,
because what waits is a shard. FSDP2 by itself does both with every microbatch.
"""

from __future__ import annotations

from composer.core import Callback, State
from composer.loggers import Logger
from composer.trainer import trainer as composer_trainer
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from modernbert_train.config.schema import RunConfig
from modernbert_train.train.adapters import inner_model, is_sharded


def _replicate(module: nn.Module, find_unused_parameters: bool) -> nn.Module:
    return DistributedDataParallel(module, find_unused_parameters=find_unused_parameters, gradient_as_bucket_view=True)


composer_trainer.prepare_ddp_module = _replicate  # the Trainer has no argument for it


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
