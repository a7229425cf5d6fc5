"""Training in a bare loop: the run's own data, model, loss and optimizer, and nothing of what a run does besides."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from modernbert_train.batch import Batch, weighted
from modernbert_train.clock import Clock
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.check import check_data
from modernbert_train.data.loader import StepBatch
from modernbert_train.data.path import open_path
from modernbert_train.distributed.compute import Compute
from modernbert_train.models import build as models
from modernbert_train.models.distilled import Distilled
from modernbert_train.models.encoder import OnEncoder
from modernbert_train.models.init import initialize
from modernbert_train.objectives import build_objective
from modernbert_train.optim.build import apply_clock, build_optimizer
from modernbert_train.train.gradients import count_terms, counts_per_rank, gradients
from modernbert_train.train.tune.timing import Stopwatch
from modernbert_train.weights.teacher import find_teacher


def batches_of(config: RunConfig) -> Iterator[StepBatch]:
    """The batches of a run on one rank, from its first."""
    facts = check_data(config)
    objective_of = partial(build_objective, vocabulary=facts.vocabulary)
    return iter(open_path(config.data, config.seed, Clock.of(config), facts, objective_of).loader(0, 1))


def fresh_model(config: RunConfig, compute: Compute) -> OnEncoder:
    """The run's model as a run from scratch has it, on its device, in training."""
    model = models.build_model(config.model, config.objective, config.compute)
    if config.compute.compile:
        model.compile_layers()
    initialize(model, config.model, config.seed)
    model.set_phase(Clock.of(config).phases[0].model)
    if isinstance(model, Distilled):
        teacher = find_teacher(config.objective, config.model, config.phases.values(), config.data.tokenizer)
        assert teacher is not None
        model.listen(teacher.read(config.compute, compute.device, bf16=compute.bf16))
    return model.to(compute.device).train()


class BareLoop:
    """Steps of a run of one phase, at its first rate: gradients as `train` makes them, and the update.

    Args:
        model: on the device, in training.
        config: the run.
        compute: device and precision.
    """

    def __init__(self, model: OnEncoder, config: RunConfig, compute: Compute) -> None:
        self.model, self.config, self.compute = model, config, compute
        self.optimizer = build_optimizer(config.optim, model)
        apply_clock(self.optimizer, Clock.of(config), 0)
        self._steps = 0

    def gradients(self, batch: StepBatch, watch: Stopwatch | None = None) -> Tensor:
        """Forward and backward of every microbatch; gives the loss of the step, which is still on the device."""

        def passed(event: str, microbatch: Batch, value: Any, last: bool) -> None:
            if watch is not None and event == "after_loss":
                watch.mark("forward")
            elif watch is not None and event == "after_backward":
                watch.mark("backward")

        parts = gradients(self.model, batch, self.compute, self.config.seed, self._steps, passed)
        terms = batch.plan.objective.terms
        sums = {term: torch.stack([part.sums[term] for part in parts]).sum() for term in terms}
        return weighted(sums, terms, counts_per_rank(count_terms(batch.microbatches, terms), self.compute.device))

    def step(self, batch: StepBatch, watch: Stopwatch | None = None) -> Tensor:
        """A whole step; gives its loss."""
        if watch is not None:
            watch.start()
        loss = self.gradients(batch, watch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._steps += 1
        if watch is not None:
            watch.mark("optimizer")
        return loss
