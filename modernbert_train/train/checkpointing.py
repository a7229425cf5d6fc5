"""Take checkpoints: decide when one is due and collect its contents.

The step only copies the state to host memory; saver.py writes it to disk while training continues.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from composer.core import State

from modernbert_train.checkpoints.checkpoint import folder_of
from modernbert_train.checkpoints.run_folder import RunFolder
from modernbert_train.checkpoints.saved_state import GuardState, SavedState, SavedTime, TrainingState
from modernbert_train.checkpoints.saver import Saver, Snapshot
from modernbert_train.clock import Clock, crosses, is_pythia
from modernbert_train.config.schema import CheckpointConfig
from modernbert_train.core.read_json import as_type
from modernbert_train.data.loader import PackedLoader
from modernbert_train.distributed.group import local_rank, num_ranks, on_rank_zero, this_rank
from modernbert_train.distributed.heartbeat import post_heartbeat
from modernbert_train.distributed.save_requests import Requests, SaveRequest
from modernbert_train.report.effective import FIRST_STEP
from modernbert_train.report.progress import Progress
from modernbert_train.report.record import Record
from modernbert_train.train.adapters import inner_model
from modernbert_train.weights.shares import Copier

_LONG_SECONDS = 1.0  # a step that waits longer for the previous checkpoint is reported


@dataclass(frozen=True)
class Due:
    """A checkpoint to be written; one with `phase_end` or `milestone` is never deleted."""

    phase_end: bool
    milestone: bool


def save_due(
    settings: CheckpointConfig,
    clock: Clock,
    request: SaveRequest,
    step: int,
    before: int,
    after: int,
    *,
    rolled_back: bool,
) -> Due | None:
    """Return the checkpoint that is due after a step, or None.

    Args:
        settings, clock: the run's.
        request: this step's request, by signal or elapsed time.
        step: number of the step, from 1.
        before, after: global tokens before and after the step.
        rolled_back: True if the weights were just taken from an earlier checkpoint.
    """
    milestone = crosses(settings.interval_tokens, before, after)
    milestone = milestone or (settings.milestones == "pythia" and is_pythia(step))
    due = Due(clock.ends_phase(before, after), milestone)
    by_steps = settings.interval_steps is not None and step % settings.interval_steps == 0
    requested = request.stop or request.overdue
    return due if requested or by_steps or rolled_back or due.phase_end or due.milestone else None


class Checkpoints:
    """Takes checkpoints, and ends the run after one if a signal requested it.

    Args:
        settings: the run's section checkpoint.
        clock: the run's clock.
        config_yaml: text of the run's config.yaml.
        loader: holds the position in the data.
        folder: the run's folder.
        fingerprint: fingerprint of the data.
        guard_memory: the guard's state, saved in checkpoints.
        record: flushed before a checkpoint is saved, since a resume would not repeat those steps.
        progress: shows long waits.
        requests: this rank's requests.
        saver: writes checkpoints.
        writers: ranks that see rank 0's folder and share in writing.
        log: sends numbers to the loggers.

    Attributes:
        restarted: True if another process trained this run before; the first step is then noted in starts.jsonl.
    """

    def __init__(
        self,
        settings: CheckpointConfig,
        clock: Clock,
        config_yaml: str,
        loader: PackedLoader,
        folder: RunFolder,
        fingerprint: dict[str, str],
        guard_memory: GuardState,
        record: Record,
        progress: Progress,
        requests: Requests,
        saver: Saver,
        writers: list[int],
        log: Callable[[dict[str, Any]], None],
    ) -> None:
        self._settings, self._clock = settings, clock
        self._config_yaml = config_yaml
        self._guard_memory = guard_memory
        self._loader = loader
        self._folder = folder
        self._fingerprint = fingerprint
        self._record = record
        self._progress = progress
        self._requests = requests
        self._saver = saver
        self._log = log
        self._copier = Copier(this_rank(), writers, num_ranks())
        self._taken: dict[str, float | int | str] = {}  # fields of the last checkpoint's record
        self.restarted = False

    def before_steps(self, state: State) -> None:
        """Reject a state that cannot be saved; save the initial weights if configured."""
        self._copier.check(inner_model(state.model))
        first = folder_of(self._folder.checkpoints, 0)
        is_due = self._settings.milestones == "pythia" and state.timestamp.batch.value == 0
        if is_due and not on_rank_zero(first.exists):
            self.save(state, phase=self._clock.phases[0].name, phase_end=False, milestone=True)
            self._saver.wait()  # data workers are forked next, when no other thread should be running

    def before_update(self) -> None:
        """Make the device wait for the pending checkpoint's copies, which the update would overwrite."""
        self._copier.before_update()

    def after_step(self, state: State, requests: SaveRequest, before: int, phase: str, *, rolled_back: bool) -> bool:
        """Save a checkpoint if one is due; every rank calls this.

        Args:
            state: state after the step.
            requests: requests of all ranks, from this step.
            before: global tokens before the step.
            phase: phase of the step.
            rolled_back: True if weights and moments were just taken from an earlier checkpoint.

        Returns:
            True if the run ends here because of a signal.
        """
        step, after = state.timestamp.batch.value, state.timestamp.token.value
        if num_ranks() == 1:
            requests = self._requests.of_this_rank()
        if self.restarted and this_rank() == 0:
            self._folder.record_start({"kind": FIRST_STEP, "step": step})
        self.restarted = False
        if requests.failed:
            self._saver.wait()
        self._record_last()
        due = save_due(self._settings, self._clock, requests, step, before, after, rolled_back=rolled_back)
        if due is not None:
            self._record.flush()
            self.save(state, phase=phase, phase_end=due.phase_end, milestone=due.milestone)
        return requests.stop

    def save(self, state: State, *, phase: str, phase_end: bool, milestone: bool) -> None:
        """Copy the state and start writing it; every rank calls this, and all raise if the previous write failed."""
        began = time.perf_counter()
        post_heartbeat("the previous checkpoint, which is being written")
        self._saver.wait()
        waited = time.perf_counter() - began
        self._record_last()
        step, tokens = state.timestamp.batch.value, state.timestamp.token.value
        share, total_bytes = self._copier.copy(inner_model(state.model), state.optimizers[0])
        timestamp = state.timestamp.state_dict()
        saved = SavedState(
            step=step,
            tokens=tokens,
            phase=phase,
            data=self._fingerprint,
            training=TrainingState(
                seconds=state.timestamp.total_wct.total_seconds(),
                timestamp=as_type(SavedTime, {key: timestamp[key] for key in SavedTime.__annotations__}),
                loader={**self._loader.state_dict(), "phase": phase},
                stability=self._guard_memory,
            ),
            average=[],
        )
        self._saver.start(
            Snapshot(
                step=step,
                share=share,
                copied=self._copier.wait,
                total_bytes=total_bytes,
                state=saved.as_json(),
                config_yaml=self._config_yaml,
                phase_end=phase_end,
                milestone=milestone,
            )
        )
        self._requests.saved()
        blocked = time.perf_counter() - began
        if waited > _LONG_SECONDS:
            self._progress.line(
                f"step {step}: waited {waited:.1f} s for the previous checkpoint, which was still being written. "
                "Checkpoints are due faster than the disk can write them."
            )
        self._taken = {"step": step, "phase": phase, "tokens": tokens}
        self._taken |= {"blocked_seconds": round(blocked, 6), "waited_seconds": round(waited, 6)}

    def finish(self) -> None:
        """Wait for the last checkpoint; every rank calls this when training ends.

        Raises:
            RunError: the checkpoint could not be written.
        """
        self._saver.wait()
        self._record_last()

    def settle(self, seconds: float) -> None:
        """Let a checkpoint that is being written finish, before the run ends with an error.

        With several ranks, the others write their shares meanwhile. The wait is short, so this rank does not look hung.

        Args:
            seconds: distributed.timeout_seconds.
        """
        self._saver.settle(seconds if num_ranks() == 1 else seconds / 2)

    def _record_last(self) -> None:
        """Record the last checkpoint once it is written."""
        if (warning := self._saver.stall_warning()) is not None and local_rank() == 0:
            print(f"warning: {warning}", file=sys.stderr, flush=True)
        saved = self._saver.take_saved()
        if saved is None:
            return
        cost = {"write_seconds": round(saved.seconds, 3), "bytes": saved.bytes}
        self._record.write({"kind": "checkpoint", **self._taken, **cost})
        blocked = {key: self._taken[key] for key in ("blocked_seconds", "waited_seconds")}
        self._log({f"checkpoint/{key}": value for key, value in (blocked | cost).items()})
