"""Training in a bare loop: the run's own data, model, loss and optimizer, and nothing of what a run does besides."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from modernbert_train.batch import Batch, weighted
from modernbert_train.clock import at
from modernbert_train.compute import Compute
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.check import check_data
from modernbert_train.data.loader import StepBatch
from modernbert_train.data.path import open_path
from modernbert_train.models import build as models
from modernbert_train.models.encoder import OnEncoder
from modernbert_train.models.init import initialize
from modernbert_train.objectives import build_objective
from modernbert_train.optim.build import build_optimizer
from modernbert_train.tune.timing import Clock, autocast


def batches_of(config: RunConfig) -> Iterator[StepBatch]:
    """The batches of a run on one rank, from its first."""
    facts = check_data(config)
    return iter(open_path(config, facts, partial(build_objective, vocabulary=facts.vocabulary)).loader(0, 1))


def fresh_model(config: RunConfig, compute: Compute) -> OnEncoder:
    """The run's model as a run from scratch has it, on its device, in training."""
    model = models.build_model(config.model, config.objective, config.compute)
    if config.compute.compile:
        model.compile_layers()
    initialize(model, config.model, config.seed)
    model.set_phase(at(config, 0).model)
    return model.to(compute.device).train()


class BareLoop:
    """Steps of a run of one phase, at its first rate.

    Args:
        model: on the device, in training.
        config: the run.
        compute: device and precision.
    """

    def __init__(self, model: OnEncoder, config: RunConfig, compute: Compute) -> None:
        self.model, self.config, self.compute = model, config, compute
        self.optimizer = build_optimizer(config, model)
        self._terms = at(config, 0).objective.terms

    def loss(self, batch: Batch, counts: dict[str, int]) -> Tensor:
        """What a microbatch adds to the loss of a step of these counts."""
        with autocast(self.compute.device, self.compute.bf16):
            sums = self.model(batch)
        return weighted(sums.losses, self._terms, counts)

    def counts(self, batch: StepBatch) -> dict[str, int]:
        """Of a whole step; at least 1, since something is divided by them."""
        return {term: max(1, sum(part.counts[term] for part in batch.microbatches)) for term in self._terms}

    def gradients(self, batch: StepBatch, clock: Clock | None = None) -> Tensor:
        """Forward and backward of every microbatch; gives the loss of the step."""
        counts, device = self.counts(batch), self.compute.device
        total = torch.zeros((), device=device)
        for part in batch.microbatches:
            loss = self.loss(part.to(device, non_blocking=True), counts)
            if clock is not None:
                clock.mark("forward")
            loss.backward()
            if clock is not None:
                clock.mark("backward")
            total += loss.detach()
        return total

    def step(self, batch: StepBatch, clock: Clock | None = None) -> Tensor:
        """A whole step; gives its loss, which is still on the device."""
        if clock is not None:
            clock.start()
        loss = self.gradients(batch, clock)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if clock is not None:
            clock.mark("optimizer")
        return loss
