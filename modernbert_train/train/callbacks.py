"""What happens around a step: the clock is set, the step is measured, validated, saved, and a signal is obeyed.

Composer runs callbacks in the order of its list, and build.py lists them in the order in which they stand here: what
a step measured is on disk before the checkpoint that would skip the step is.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from composer.core import Callback, Event, State
from composer.loggers import Logger
from composer.utils import dist

from modernbert_train.clock import position_at
from modernbert_train.config.load import to_yaml
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.loader import PackedLoader, StepBatch
from modernbert_train.errors import RunError
from modernbert_train.keyed import derive
from modernbert_train.optim.build import apply_clock
from modernbert_train.train import checkpoint
from modernbert_train.train.adapters import ComposerMaskedLM, adapter_of, inner_model
from modernbert_train.train.evaluate import Validation
from modernbert_train.train.heartbeat import passed
from modernbert_train.train.meter import Meter, scalars
from modernbert_train.train.progress import Progress
from modernbert_train.train.ranks import on_rank_zero
from modernbert_train.train.run_folder import RunFolder
from modernbert_train.train.stability import Guard, UnstableRun
from modernbert_train.train.state import gather_optimizer, gather_weights

_DROPOUT = 4


class SetClock(Callback):
    """Before each step, sets everything that is a function of the clock: rates, decay, RoPE base, dropout's key."""

    def __init__(self, config: RunConfig, phase: str | None) -> None:
        self._config = config
        self._phase = phase  # of the last step; None before the first

    def batch_start(self, state: State, logger: Logger) -> None:
        batch: StepBatch = state.batch
        tokens = state.timestamp.token.value
        if batch.plan.tokens_before != tokens:
            raise RunError(
                f"the data stands at {batch.plan.tokens_before} tokens and the clock at {tokens}. They must never "
                "part; please report this with the run's config.yaml."
            )
        position = position_at(self._config, tokens)
        if position.name != self._phase:
            if self._phase is not None and position.phase.reset_moments:
                state.optimizers[0].state.clear()
            self._phase = position.name
        apply_clock(state.optimizers[0], self._config, tokens)
        model = inner_model(state.model)
        model.set_global_rope_theta(position.phase.global_rope_theta)
        model.set_local_rope_theta(position.phase.local_theta(self._config.model))
        state.device_train_microbatch_size = position.phase.microbatch_rows
        key_dropout(self._config, adapter_of(state.model), state.timestamp.batch.value)


def key_dropout(config: RunConfig, adapter: ComposerMaskedLM, steps: int) -> None:
    """Let the next microbatches be those of the step after so many; see `ComposerMaskedLM.begin_step`."""
    adapter.begin_step(derive(config.seed, _DROPOUT, steps))


class Trace(Callback):
    """Tells heartbeat.py where this rank stands, so that a rank that keeps the others waiting can be named."""

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        passed(f"{event.value} of step {state.timestamp.batch.value}")


class Measure(Callback):
    """Writes one line to metrics.jsonl for each step, feeds the progress display and the loggers.

    The device is done with a step when this is called: Composer 0.32.1 has read the loss after the update, as it reads
    after each batch whether any rank ran out of data, and the guard the gradient before the update. So nothing here
    waits for the device; the norm of the update is the one number that is copied from it.
    """

    def __init__(
        self, folder: RunFolder | None, progress: Progress, guard: Guard, loader: PackedLoader, meter: Meter
    ) -> None:
        self._guard = guard
        self._folder = folder
        self._progress = progress
        self._loader = loader
        self._meter = meter
        self._started = self._delivered = 0.0

    def before_dataloader(self, state: State, logger: Logger) -> None:
        self._started = time.perf_counter()

    def after_dataloader(self, state: State, logger: Logger) -> None:
        self._delivered = time.perf_counter()

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._guard.refused:  # no step was taken; the guard has recorded why
            return
        batch: StepBatch = state.batch
        seconds = time.perf_counter() - self._started
        optimizer, plan = state.optimizers[0], batch.plan
        update_norm = getattr(optimizer, "last_update_norm", None)
        predicted = sum(microbatch.num_predicted for microbatch in batch.microbatches)
        entry: dict[str, Any] = {
            "kind": "step",
            "step": state.timestamp.batch.value,
            "phase": plan.phase,
            "tokens": state.timestamp.token.value,
            "rows": plan.num_rows,
            "row_tokens": plan.row_tokens,
            "loss": state.total_loss_dict["loss/train/total"],
            "lr": optimizer.param_groups[0]["lr"],
            "grad_norm": self._guard.grad_norm,
            "update_norm": None if update_norm is None else float(update_norm),
            **self._meter.measure(plan, self._loader.rows, predicted, seconds, self._delivered - self._started),
        }
        if self._folder is not None:
            self._folder.record(entry)
        self._progress.step(entry)
        if plan.unused:
            self._progress.line(
                f"the run ends here; {plan.unused:,} tokens of text were waiting for a row and are not trained on"
            )
        skipped = ("kind", "step", "phase")
        logger.log_metrics({f"train/{k}": v for k, v in scalars(entry) if k not in skipped and v is not None})

    def close(self, state: State, logger: Logger) -> None:
        self._progress.close()


def step_tokens(state: State) -> tuple[int, int]:
    """Global tokens before and after the step that has just ended."""
    assert state.previous_timestamp is not None
    return state.previous_timestamp.token.value, state.timestamp.token.value


def ends_phase(config: RunConfig, before: int, after: int) -> bool:
    """Whether a step from one token count to another ended a phase or the run."""
    return after >= config.total_tokens or position_at(config, before).index != position_at(config, after).index


def crosses(interval: int | None, before: int, after: int) -> bool:
    """Whether a step from one token count to another passed a multiple of an interval; None never."""
    return interval is not None and before // interval != after // interval


class Validate(Callback):
    """Measures the held-out text at the end of each phase, of the run, and every eval.interval_tokens."""

    def __init__(
        self, config: RunConfig, validation: Validation, folder: RunFolder | None, progress: Progress, bf16: bool
    ) -> None:
        self._config = config
        self._validation = validation
        self._folder = folder
        self._progress = progress
        self._bf16 = bf16

    def batch_end(self, state: State, logger: Logger) -> None:
        before, after = step_tokens(state)
        due = crosses(self._config.eval.interval_tokens, before, after)
        if not due and not ends_phase(self._config, before, after):
            return
        position = position_at(self._config, before)
        device = state.device.tensor_to_device(torch.zeros(())).device
        found = self._validation.evaluate(inner_model(state.model), position.phase, device, self._bf16).as_dict()
        entry = {"kind": "validation", "step": state.timestamp.batch.value, "phase": position.name, "tokens": after}
        if self._folder is not None:
            self._folder.record(entry | found)
        self._progress.line(
            f"validation at {after:,} tokens: loss {found['loss']:.3f} (unigram {found['unigram_loss']:.3f}), "
            f"accuracy {found['accuracy']:.1%}"
        )
        logger.log_metrics({f"validation/{key}": value for key, value in found.items()})


# A scheduler that signals every process of a job, and the launcher that passes the signal on, mean the same request.
ONE_REQUEST_SECONDS = 1.0


class Save(Callback):
    """Writes checkpoints, and stops the run after one when a signal asked for it.

    SIGINT, SIGTERM and SIGUSR1 to any rank let all ranks finish the step, save, and end; a second signal ends at once.
    """

    def __init__(
        self, config: RunConfig, loader: PackedLoader, folder: RunFolder, fingerprint: dict[str, str], guard: Guard
    ) -> None:
        self._config = config
        self._guard = guard
        self._loader = loader
        self._folder = folder
        self._fingerprint = fingerprint
        self._last_saved = time.monotonic()
        self._signal: int | None = None
        self._signalled = 0.0
        self.stopped = False

    def listen(self) -> None:
        """Take over the signals."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            if time.monotonic() - self._signalled < ONE_REQUEST_SECONDS:
                return
            os._exit(128 + number)  # not sys.exit: a worker or a collective may be what hangs
        self._signal, self._signalled = number, time.monotonic()
        print(
            f"{signal.Signals(number).name}: finishing this step, then saving; once more ends at once.", file=sys.stderr
        )

    def batch_end(self, state: State, logger: Logger) -> None:
        settings = self._config.checkpoint
        step = state.timestamp.batch.value
        waited = time.monotonic() - self._last_saved
        overdue = settings.interval_seconds is not None and waited >= settings.interval_seconds
        asked = torch.tensor([self._signal is not None, overdue], dtype=torch.uint8)
        if dist.get_world_size() > 1:  # a signal to one rank, or one rank's clock, decides for all
            asked = state.device.tensor_to_device(asked)
            dist.all_reduce(asked, reduce_operation="MAX")
        signalled, overdue = (bool(flag) for flag in asked.tolist())
        phase_end = ends_phase(self._config, *step_tokens(state))
        milestone = crosses(settings.interval_tokens, *step_tokens(state))
        due = settings.interval_steps is not None and step % settings.interval_steps == 0
        if signalled or overdue or phase_end or milestone or due or self._guard.rolled_back:
            self.save(state, phase_end, milestone)
        if signalled:
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
                step,
                weights=weights,
                optimizer=optimizer,
                state={
                    "step": step,
                    "tokens": state.timestamp.token.value,
                    "timestamp": {key: value for key, value in timestamp.items() if not key.endswith("_wct")},
                    "seconds": state.timestamp.total_wct.total_seconds(),
                    "phase": state.batch.plan.phase,  # of the last step: whether a border has been crossed since
                    "loader": self._loader.state_dict(),
                    "data": self._fingerprint,
                    "stability": self._guard.state_dict(),
                },
                config_yaml=to_yaml(self._config),
                phase_end=phase_end,
                milestone=milestone,
            )
            checkpoint.clean(self._folder.checkpoints, self._config.checkpoint.keep)

        on_rank_zero(write)
        self._last_saved = time.monotonic()


class SafeReport(Callback):
    """Redraws report.html when a run ends, for whatever reason; a failure to draw never costs the run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def close(self, state: State, logger: Logger) -> None:
        from modernbert_train.report import write_report

        try:
            write_report(self._folder)
        except Exception as error:
            print(f"warning: {self._folder}/report.html could not be drawn: {error}", file=sys.stderr)
