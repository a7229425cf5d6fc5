"""What happens around a step: the clock is set, the step is measured, validated, saved, and a signal is obeyed.

Composer runs callbacks in the order of its list, and build.py lists them in the order in which they stand here: what
a step measured is on disk before the checkpoint that would skip the step is.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from composer.core import Callback, Event, State
from composer.loggers import Logger
from torch import Tensor

from modernbert_train.clock import at, position_at, validates
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.loader import PackedLoader, StepBatch
from modernbert_train.errors import RunError
from modernbert_train.evals.heldout import Evaluation, Validation
from modernbert_train.keyed_random import derive
from modernbert_train.optim.build import apply_clock
from modernbert_train.ranks.heartbeat import passed
from modernbert_train.run.async_scalar import Reading
from modernbert_train.run.progress import Progress
from modernbert_train.run.run_folder import RunFolder
from modernbert_train.run.throughput import Meter, scalars
from modernbert_train.train.adapters import ComposerMaskedLM, adapter_of, inner_model
from modernbert_train.train.stability import Guard

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
        inner_model(state.model).set_phase(at(self._config, tokens).modernbert)
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

    The host has been told the loss and the gradient's norm by the guard, before the update, and nothing here waits for
    the update: the line of a step is written when the norm of its update is there, which on a GPU is while the next
    step is computed. What must stand behind it in the record calls `flush` first.
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
        self._line: tuple[dict[str, Any], Reading | None, Logger] | None = None  # of a step, to be written

    def before_dataloader(self, state: State, logger: Logger) -> None:
        self._started = time.perf_counter()

    def after_dataloader(self, state: State, logger: Logger) -> None:
        self._delivered = time.perf_counter()

    def after_train_batch(self, state: State, logger: Logger) -> None:
        self.flush()  # while the device goes on with what the host has just asked of it

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._guard.refused:  # no step was taken; the guard has recorded why
            return
        batch: StepBatch = state.batch
        seconds = time.perf_counter() - self._started
        optimizer, plan = state.optimizers[0], batch.plan
        update_norm: Tensor | None = getattr(optimizer, "last_update_norm", None)
        predicted = sum(microbatch.num_predicted for microbatch in batch.microbatches)
        entry: dict[str, Any] = {
            "kind": "step",
            "step": state.timestamp.batch.value,
            "phase": plan.phase,
            "tokens": state.timestamp.token.value,
            "rows": plan.num_rows,
            "row_tokens": plan.row_tokens,
            "predicted": self._guard.predicted,
            "loss": state.total_loss_dict["loss/train/total"],
            "lr": optimizer.param_groups[0]["lr"],
            "grad_norm": self._guard.grad_norm,
            "update_norm": None,
            **self._meter.measure(plan, self._loader.rows, predicted, seconds, self._delivered - self._started),
        }
        reading = None if update_norm is None else Reading(update_norm)
        self._line = (entry, reading, logger)
        if reading is None or reading.is_here() or plan.unused:
            self.flush()
        if plan.unused:
            self._progress.line(
                f"the run ends here; {plan.unused:,} tokens of text were waiting for a row and are not trained on"
            )

    def flush(self) -> None:
        """Write the line of the last step, if it is not written yet."""
        if self._line is None:
            return
        (entry, reading, logger), self._line = self._line, None
        if reading is not None:
            entry["update_norm"] = reading.value()
        if self._folder is not None:
            self._folder.record(entry)
        self._progress.step(entry)
        skipped = ("kind", "step", "phase")
        logger.log_metrics({f"train/{k}": v for k, v in scalars(entry) if k not in skipped and v is not None})

    def close(self, state: State, logger: Logger) -> None:
        self.flush()
        self._progress.close()


class PlanAhead(Callback):
    """Uses the time in which the device computes, and the host has only to wait, to plan a batch."""

    def __init__(self, loader: PackedLoader) -> None:
        self._loader = loader

    def after_train_batch(self, state: State, logger: Logger) -> None:
        self._loader.plan_ahead()


def step_tokens(state: State) -> tuple[int, int]:
    """Global tokens before and after the step that has just ended."""
    assert state.previous_timestamp is not None
    return state.previous_timestamp.token.value, state.timestamp.token.value


class Validate(Callback):
    """Measures the held-out text, as often as eval: says.

    Attributes:
        last: the newest measurement of this process.
    """

    def __init__(
        self,
        config: RunConfig,
        validation: Validation,
        folder: RunFolder | None,
        progress: Progress,
        measure: Measure,
        bf16: bool,
    ) -> None:
        self._config = config
        self._validation = validation
        self._measure = measure
        self._folder = folder
        self._progress = progress
        self._bf16 = bf16
        self.last: Evaluation | None = None

    def batch_end(self, state: State, logger: Logger) -> None:
        before, after = step_tokens(state)
        if not validates(self._config, self._validation.tokens, before, after):
            return
        self._measure.flush()
        position = position_at(self._config, before)
        device = state.device.tensor_to_device(torch.zeros(())).device
        self.last = self._validation.evaluate(inner_model(state.model), position.phase, device, self._bf16)
        found = self.last.as_dict()
        entry = {"kind": "validation", "step": state.timestamp.batch.value, "phase": position.name, "tokens": after}
        if self._folder is not None:
            self._folder.record(entry | found)
        self._progress.line(
            f"validation at {after:,} tokens: loss {found['loss']:.3f} (unigram {found['unigram_loss']:.3f}), "
            f"accuracy {found['accuracy']:.1%}"
        )
        logger.log_metrics({f"validation/{key}": value for key, value in found.items()})


class SafeReport(Callback):
    """Redraws report.html when a run ends, for whatever reason; a failure to draw never costs the run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def close(self, state: State, logger: Logger) -> None:
        from modernbert_train.report import write_report

        if not (self._folder / "metrics.jsonl").exists():
            return  # it ended before its first line: there is nothing to draw
        try:
            write_report(self._folder)
        except Exception as error:
            print(f"warning: {self._folder}/report.html could not be drawn: {error}")
