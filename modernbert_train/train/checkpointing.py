"""Writes checkpoints: when one is due, when a signal or the time asks for it, and what stands in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from modernbert_train.clock import crosses, ends_phase
from modernbert_train.config.load import to_yaml
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.loader import PackedLoader
from modernbert_train.errors import UnstableRun
from modernbert_train.ranks.group import on_rank_zero
from modernbert_train.ranks.save_requests import Requests, SaveRequest
from modernbert_train.read_json import as_type
from modernbert_train.run import checkpoint
from modernbert_train.run.record import Record
from modernbert_train.run.run_folder import RunFolder
from modernbert_train.run.saved_state import Clock, GuardState, SavedState, TrainingState
from modernbert_train.train.adapters import inner_model, step_tokens
from modernbert_train.train.step_numbers import CurrentStep
from modernbert_train.weights.gather import gather_optimizer, gather_weights


@dataclass(frozen=True)
class Due:
    """A checkpoint to be written; `phase_end` and `milestone` keep it for good."""

    phase_end: bool
    milestone: bool


def save_due(
    config: RunConfig, asked: SaveRequest, step: int, before: int, after: int, *, rolled_back: bool
) -> Due | None:
    """Whether a checkpoint is written after a step, and what it is kept for.

    Args:
        config: the run.
        asked: of this step, by a signal or by time.
        step: number of the step, from 1.
        before, after: global tokens seen before and after it.
        rolled_back: its weights are those of an earlier checkpoint.
    """
    interval = config.checkpoint.interval_steps
    due = Due(ends_phase(config, before, after), crosses(config.checkpoint.interval_tokens, before, after))
    by_steps = interval is not None and step % interval == 0
    return due if asked.stop or asked.overdue or by_steps or rolled_back or due.phase_end or due.milestone else None


class Save(Callback):
    """Writes checkpoints, and stops the run after one when a signal asked for it.

    Args:
        config: the run.
        loader: the place in the data.
        folder: the run's folder.
        fingerprint: of the data.
        guard_memory: what a checkpoint keeps of the guard.
        record: what a step measured is on disk before the checkpoint that would skip the step is.
        step: what all ranks know of the present one.
        requests: this rank's.

    Attributes:
        stopped: it did.
    """

    def __init__(
        self,
        config: RunConfig,
        loader: PackedLoader,
        folder: RunFolder,
        fingerprint: dict[str, str],
        guard_memory: GuardState,
        record: Record,
        step: CurrentStep,
        requests: Requests,
    ) -> None:
        self._config = config
        self._guard_memory = guard_memory
        self._loader = loader
        self._folder = folder
        self._fingerprint = fingerprint
        self._record = record
        self._step = step
        self._requests = requests
        self.stopped = False

    def batch_end(self, state: State, logger: Logger) -> None:
        step = state.timestamp.batch.value
        alone = dist.get_world_size() == 1
        asked = self._requests.of_this_rank() if alone else self._step.numbers.asked
        rolled_back = self._step.rolled_back
        due = save_due(self._config, asked, step, *step_tokens(state), rolled_back=rolled_back)
        if due is not None:
            self._record.flush()
            self.save(state, due.phase_end, due.milestone)
        if asked.stop:
            self.stopped = True
            state.stop_training()

    def save(self, state: State, phase_end: bool, milestone: bool) -> None:
        """Gather the state and write it; every rank calls this, and every rank raises if rank 0's disk refuses."""
        model, step = inner_model(state.model), state.timestamp.batch.value
        is_writer = dist.get_global_rank() == 0
        weights = gather_weights(model, keep=is_writer)
        optimizer = gather_optimizer(model, state.optimizers[0], keep=is_writer)
        timestamp = state.timestamp.state_dict()

        def write() -> None:
            tensors = weights | optimizer
            if damaged := [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]:
                raise UnstableRun(
                    f"step {step}: {len(damaged)} weights or moments are not finite, {damaged[0]} first, so no "
                    "checkpoint is written; those there are untouched and the same command goes on from them. Lower "
                    "optim.lr if this comes again."
                )
            checkpoint.commit(
                self._folder.checkpoints,
                weights=weights,
                optimizer=optimizer,
                state=SavedState(
                    step=step,
                    tokens=state.timestamp.token.value,
                    phase=state.batch.plan.phase,
                    data=self._fingerprint,
                    training=TrainingState(
                        seconds=state.timestamp.total_wct.total_seconds(),
                        timestamp=as_type(Clock, {key: timestamp[key] for key in Clock.__annotations__}),
                        loader=self._loader.state_dict(),
                        stability=self._guard_memory,
                    ),
                    average=[],
                ),
                config_yaml=to_yaml(self._config),
                phase_end=phase_end,
                milestone=milestone,
            )
            checkpoint.clean(self._folder.checkpoints, self._config.checkpoint.keep)

        on_rank_zero(write)
        self._requests.saved()
