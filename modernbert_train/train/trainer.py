"""Composer's Trainer, asking the device and the other ranks for nothing that this rank can know by itself.

In each step Composer 0.32.1 lets the ranks meet six times and waits for the device as often: whether any of them is
out of data, how much they have, the loss, the number of rows and of tokens, the time. The plan of a batch, which every
rank has, says nearly all of that. What is left is one sum of predicted tokens, which never leaves the device, and the
guard's numbers with the loss among them (stability.py): the one thing in a step that is waited for.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from composer import Trainer
from composer.core import Event
from composer.trainer.trainer import TrainerMode
from composer.utils import dist
from torch import Tensor

from modernbert_train.data.loader import StepBatch
from modernbert_train.data.planner import BatchPlan


class PlannedTrainer(Trainer):
    """A Trainer for batches that carry their plan. A callback must set `state.total_loss_dict` before the update."""

    def _iter_dataloader(self, trainer_mode: TrainerMode) -> Iterator[Any]:
        """All ranks follow one plan, so all of them end with the same batch."""
        if trainer_mode != TrainerMode.TRAIN:
            yield from super()._iter_dataloader(trainer_mode)
            return
        batches = iter(self.state.dataloader)
        while True:
            self.engine.run_event(Event.BEFORE_DATALOADER)
            try:
                batch = next(batches)
            except StopIteration:
                self.engine.run_marker_only_event(Event.AFTER_DATALOADER)
                return
            yield batch

    def _train_batch(self, use_grad_scaling: bool) -> None:
        """One step. Composer would read what this returned, at the price of a wait."""
        self._train_microbatches(self.state.batch.microbatches)
        for optimizer in self.state.optimizers:
            optimizer.step()
        self.first_train_batch_complete = True

    def _train_microbatches(self, microbatches: tuple[Any, ...], *_: Any, **__: Any) -> None:
        """Gradients of the mean over the predicted tokens of the global batch, in the optimizers' parameters."""
        self.engine.run_event(Event.BEFORE_TRAIN_BATCH)
        for optimizer in self.state.optimizers:
            optimizer.zero_grad(set_to_none=True)
        batch: StepBatch = self.state.batch
        mean_predicted = self._mean_over_ranks(sum(part.num_predicted for part in microbatches))
        for number, part in enumerate(microbatches, start=1):
            self.state.batch = self._train_data_spec.microbatch_transforms(part)
            self._train_microbatch(False, mean_predicted, number == len(microbatches))
        self.state.batch = batch
        self.engine.run_event(Event.AFTER_TRAIN_BATCH)

    def _mean_over_ranks(self, number: int) -> float | Tensor:
        """DDP and FSDP2 divide gradients by the number of ranks; of several ranks it is fp64 and on the device.

        Where there is no label on any rank, all losses are 0 and so are their gradients, whatever they are divided by.
        """
        if dist.get_world_size() == 1:
            return float(max(1, number))
        total = self.state.device.tensor_to_device(torch.tensor(number, dtype=torch.float64))
        dist.all_reduce(total)
        return total.clamp(min=1) / dist.get_world_size()

    def _accumulate_time_across_ranks(
        self, num_samples: int | float, num_tokens: int, batch_time: timedelta
    ) -> tuple[int, int, timedelta]:
        """Rows and tokens of the global batch, and this rank's time."""
        plan: BatchPlan = self.state.batch.plan
        return plan.num_rows, plan.tokens, batch_time
