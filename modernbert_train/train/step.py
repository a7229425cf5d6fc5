"""The loop of a run, and one optimizer step from top to bottom. Read this first.

Composer's trainer calls `Loop.run` instead of its loop. It manages the device, DDP or FSDP2, callbacks and loggers, and
this loop fires all its events at the usual places. None of our work is hooked to an event: everything is called here,
in order. Forward and backward passes are in gradients.py.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from composer import Trainer
from composer.core import Event, State

from modernbert_train.clock import Clock
from modernbert_train.config.schema import DistributedConfig
from modernbert_train.data.loader import PackedLoader, StepBatch
from modernbert_train.data.planner import BatchPlan
from modernbert_train.distributed.compute import Compute
from modernbert_train.distributed.group import set_timeout
from modernbert_train.distributed.heartbeat import post_heartbeat
from modernbert_train.distributed.save_requests import Requests
from modernbert_train.errors import RunError
from modernbert_train.optim.optimizers import apply_clock
from modernbert_train.optim.stable_adamw import clip
from modernbert_train.train.adapters import inner_model
from modernbert_train.train.checkpointing import Checkpoints
from modernbert_train.train.events import Events
from modernbert_train.train.gradients import gradients
from modernbert_train.train.measurements import Measurements
from modernbert_train.train.recorder import Recorder, Times
from modernbert_train.train.silent_faults import SilentFaults
from modernbert_train.train.stability import Guard
from modernbert_train.train.step_numbers import sum_numbers

if TYPE_CHECKING:
    from modernbert_train.train.profiling import Profile


@dataclass(kw_only=True)
class Loop:
    """Training steps, from one start of a run to its end or its stop.

    Attributes:
        clock, seed, distributed: the run's.
        compute: device and precision.
        trainer: Composer's trainer, whose state holds the model, the optimizer and the clock.
        loader: this rank's batches.
        requests: this rank's requests to save or stop.
        guard: decides whether an update is skipped.
        recorder: writes one line for each step.
        measurements: held-out loss and the run's `evals`.
        checkpoints: saves checkpoints that are due.
        silent: detects slow ranks and replicas whose weights differ; None if the parallelism does not allow it.
        profile: the profiler, or None.
        phase: phase of the previous step; None before the first.
        stopped: True once a signal has ended the run, after a checkpoint.
    """

    clock: Clock
    seed: int
    distributed: DistributedConfig
    compute: Compute
    trainer: Trainer
    loader: PackedLoader
    requests: Requests
    guard: Guard
    recorder: Recorder
    measurements: Measurements
    checkpoints: Checkpoints
    silent: SilentFaults | None
    profile: Profile | None
    phase: str | None
    stopped: bool = False

    def __post_init__(self) -> None:
        self.events = Events(self.trainer, self.silent)
        self._steps = 0  # since this start
        self._freezes = gc.get_freeze_count() > 0  # our command froze its imports; others manage theirs
        self._ended = datetime.now()  # end of the previous step

    @property
    def state(self) -> State:
        return self.trainer.state

    def run(self) -> None:
        """Train until the last token, or until a stop signal."""
        # With a cold cache the first step compiles layers for minutes, while the other ranks wait.
        set_timeout(self.distributed.first_step_timeout_seconds, self.distributed.timeout_seconds)
        self.events.fire(Event.FIT_START)
        self.measurements.before_steps(self.state)
        self.checkpoints.before_steps(self.state)
        if self.profile is not None:
            self.profile.begin()
        self.state.model.train()
        if self.state.timestamp.batch == 0:  # to Composer a run is one epoch; a resumed run is within it
            self.events.fire(Event.ITERATION_START)
            self.events.fire(Event.EPOCH_START)
        self._ended = datetime.now()
        for batch, times in self.batches():
            self.step(batch, times)
            if self._steps == 1 and self._freezes:  # layers are compiled; exempt their objects from garbage collection
                gc.collect()
                gc.freeze()
            if self.stopped or self.state.timestamp.token.value >= self.clock.total_tokens:
                break
        self.events.fire(Event.FIT_END)

    def batches(self) -> Iterator[tuple[StepBatch, Times]]:
        """Yield this rank's batches, each with the times of its request and its arrival."""
        batches = iter(self.loader)
        while True:
            self.events.fire(Event.BEFORE_DATALOADER)
            times = Times()
            batch = next(batches, None)
            if batch is None:
                return
            post_heartbeat("a batch that was read")
            self.state.batch = batch
            self.events.fire(Event.AFTER_DATALOADER)
            times.arrived()
            yield batch, times

    def step(self, batch: StepBatch, times: Times) -> None:
        """Train on one batch."""
        state, plan, optimizer = self.state, batch.plan, self.state.optimizers[0]
        number = state.timestamp.batch.value + 1

        # functions of the clock: learning rates, weight decay, RoPE bases
        self.set_clock(plan)
        self.guard.begin(plan.phase)
        self.events.log_clock()
        self.events.fire(Event.BATCH_START)

        # gradients of the means over the global batch
        self.events.fire(Event.BEFORE_TRAIN_BATCH)
        optimizer.zero_grad(set_to_none=True)
        sums = gradients(state.model, batch, self.compute, self.seed, number - 1, self.events.fire_in_microbatch)
        state.batch = batch  # the events in microbatches have put each of those here

        # while the device computes, the host finishes the previous step's record and plans the batch after the next
        self.recorder.flush()
        self.loader.plan_ahead()

        # sum the step's numbers over ranks: the only all-reduce besides the gradients', and the only host sync
        numbers = sum_numbers(state.model, plan.objective.terms, sums, self.requests, self.silent, number)
        state.total_loss_dict = {"loss/train/total": numbers.loss}

        # skipped updates drop the gradients: optimizers leave parameters without a gradient unchanged
        verdict = self.guard.judge(batch, sums, numbers, number)
        max_norm = self.clock.phase(plan.phase).optim.max_grad_norm
        if verdict.fault is not None:
            self.trainer.logger.log_metrics({"train/skipped_updates": len(self.guard.memory["skipped_updates"])})
        if verdict.skipped:
            optimizer.zero_grad(set_to_none=True)
        elif max_norm is not None:  # its norm is known; torch's clip_grad_norm_ would compute it again
            clip(state.model.parameters(), numbers.grad_norm, max_norm)
        self.events.fire(Event.AFTER_TRAIN_BATCH)
        self.checkpoints.before_update()  # the update overwrites weights that may still be being copied
        optimizer.step()

        # advance the clock
        self.advance(plan)
        before, after = plan.tokens_before, state.timestamp.token.value
        if not verdict.skipped:  # the guard has recorded a skipped one
            self.recorder.step(batch, numbers, number, after, optimizer, times)
        if verdict.target is not None:  # after the clock: weights go back, the position in the text does not
            self.guard.roll_back(verdict.target, optimizer, plan.phase)

        # saves and measurements due by the clock; a stop saves first and leaves measurements to the next start
        if not numbers.requests.stop or after >= self.clock.total_tokens:
            self.measurements.after_step(inner_model(state.model), number, before, after)
        self.events.fire(Event.BATCH_END)
        self.stopped = self.checkpoints.after_step(
            state, numbers.requests, before, plan.phase, rolled_back=verdict.target is not None
        )
        self.events.fire(Event.BATCH_CHECKPOINT)
        if self.profile is not None:
            self.profile.after_step(number)

    def set_clock(self, plan: BatchPlan) -> None:
        """Set learning rates, weight decay and phased model fields by the clock; a new phase may reset the moments.

        Raises:
            RunError: the batch does not begin at the clock's number of tokens.
        """
        tokens = self.state.timestamp.token.value
        if plan.tokens_before != tokens:
            raise RunError(
                f"the data is at {plan.tokens_before} tokens and the clock at {tokens}. They must always "
                "agree; please report this with the run's config.yaml."
            )
        optimizer, now = self.state.optimizers[0], self.clock.at(tokens)
        if plan.phase != self.phase:
            if self.phase is not None and now.phase.reset_moments:
                optimizer.state.clear()
            self.phase = plan.phase
        apply_clock(optimizer, self.clock, tokens)
        inner_model(self.state.model).set_phase(now.model)

    def advance(self, plan: BatchPlan) -> None:
        """Advance the clock by the batch, also if its update was skipped: that text is not trained on again."""
        state, now = self.state, datetime.now()
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_batch(plan.num_rows, plan.tokens, now - self._ended)
        self._ended = now
        self._steps += 1
        if self._steps == 2:  # the ranks have synchronized since they compiled
            set_timeout(0.0, self.distributed.timeout_seconds)

    def close(self) -> None:
        """Write pending records; called however the run ends."""
        if self._freezes:
            gc.unfreeze()  # otherwise the model would stay in memory after the run, in a longer program
        self.recorder.close()
        if self.profile is not None:
            self.profile.close()
