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
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from modernbert_train.clock import position_at
from modernbert_train.config.load import to_yaml
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.loader import PackedLoader, StepBatch
from modernbert_train.errors import RunError
from modernbert_train.keyed import derive
from modernbert_train.optim import apply_clock
from modernbert_train.train import checkpoint
from modernbert_train.train.adapters import inner_model
from modernbert_train.train.evaluate import Validation
from modernbert_train.train.progress import Progress
from modernbert_train.train.ranks import on_rank_zero
from modernbert_train.train.run_folder import RunFolder
from modernbert_train.train.state import gather_optimizer, gather_weights

_DROPOUT = 4


class SetClock(Callback):
    """Before each step, sets everything that is a function of the clock: rates, decay, RoPE base, dropout's seed.

    Dropout is keyed by (seed, step, rank) instead of being carried along, so a resumed run needs no saved generator.
    (Composer 0.32.1 would not restore one in the middle of an epoch anyway.)
    """

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
        inner_model(state.model).set_global_rope_theta(position.phase.global_rope_theta)
        state.device_train_microbatch_size = position.phase.microbatch_rows
        torch.manual_seed(derive(self._config.seed, _DROPOUT, state.timestamp.batch.value, dist.get_global_rank()) >> 1)


class Measure(Callback):
    """Writes one line to metrics.jsonl for each step, feeds the progress display and the loggers."""

    def __init__(self, config: RunConfig, folder: RunFolder | None, progress: Progress, left_out: int) -> None:
        self._config = config
        self._folder = folder
        self._progress = progress
        self._started = 0.0
        self._left_out = left_out

    def before_dataloader(self, state: State, logger: Logger) -> None:
        self._started = time.perf_counter()

    def batch_end(self, state: State, logger: Logger) -> None:
        batch: StepBatch = state.batch
        seconds = time.perf_counter() - self._started
        optimizer, plan = state.optimizers[0], batch.plan
        norms = {name: getattr(optimizer, f"last_{name}", None) for name in ("grad_norm", "update_norm")}
        entry: dict[str, Any] = {
            "kind": "step",
            "step": state.timestamp.batch.value,
            "phase": plan.phase,
            "epoch": plan.epoch,
            "tokens": state.timestamp.token.value,
            "rows": plan.num_rows,
            "row_tokens": plan.row_tokens,
            "loss": state.total_loss_dict["loss/train/total"],
            "lr": optimizer.param_groups[0]["lr"],
            **{name: None if norm is None else float(norm) for name, norm in norms.items()},
            "tokens_per_second": plan.tokens / seconds,
            "packing_efficiency": plan.tokens / (plan.num_rows * plan.row_tokens),
            "seconds": seconds,
        }
        if self._folder is not None:
            self._folder.record(entry)
        self._progress.step(entry)
        if plan.left_out != self._left_out:
            self._progress.line(
                f"{plan.phase}: rows of {plan.row_tokens:,} tokens begin a new pass over the data; the last one still "
                f"had {plan.left_out - self._left_out:,} tokens"
            )
            self._left_out = plan.left_out
        skipped = ("kind", "step", "phase")
        logger.log_metrics({f"train/{k}": v for k, v in entry.items() if k not in skipped and v is not None})

    def close(self, state: State, logger: Logger) -> None:
        self._progress.close()


def step_tokens(state: State) -> tuple[int, int]:
    """Global tokens before and after the step that has just ended."""
    assert state.previous_timestamp is not None
    return state.previous_timestamp.token.value, state.timestamp.token.value


def ends_phase(config: RunConfig, before: int, after: int) -> bool:
    """Whether a step from one token count to another ended a phase or the run."""
    return after >= config.total_tokens or position_at(config, before).index != position_at(config, after).index


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
        interval = self._config.eval.interval_tokens
        due = interval is not None and before // interval != after // interval
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


class Save(Callback):
    """Writes checkpoints, and stops the run after one when a signal asked for it.

    SIGINT, SIGTERM and SIGUSR1 to any rank let all ranks finish the step, save, and end; a second signal ends at once.
    """

    def __init__(self, config: RunConfig, loader: PackedLoader, folder: RunFolder, fingerprint: dict[str, str]) -> None:
        self._config = config
        self._loader = loader
        self._folder = folder
        self._fingerprint = fingerprint
        self._last_saved = time.monotonic()
        self._signal: int | None = None
        self.stopped = False

    def listen(self) -> None:
        """Take over the signals."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            os._exit(128 + number)  # not sys.exit: a worker or a collective may be what hangs
        self._signal = number
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
        due = settings.interval_steps is not None and step % settings.interval_steps == 0
        if signalled or overdue or phase_end or due:
            self.save(state, phase_end)
        if signalled:
            self.stopped = True
            state.stop_training()

    def save(self, state: State, phase_end: bool) -> None:
        """Gather the state and write it; every rank calls this, and every rank raises if rank 0's disk refuses."""
        model, step = inner_model(state.model), state.timestamp.batch.value
        is_writer = dist.get_global_rank() == 0
        weights = gather_weights(model, keep=is_writer)
        optimizer = gather_optimizer(model, state.optimizers[0], keep=is_writer)
        timestamp = state.timestamp.state_dict()

        def write() -> None:
            checkpoint.commit(
                self._folder.checkpoints,
                step,
                weights=weights,
                optimizer=optimizer,
                state={
                    "schema": 1,
                    "step": step,
                    "tokens": state.timestamp.token.value,
                    "timestamp": {key: value for key, value in timestamp.items() if not key.endswith("_wct")},
                    "seconds": state.timestamp.total_wct.total_seconds(),
                    "phase": state.batch.plan.phase,  # of the last step: whether a border has been crossed since
                    "loader": self._loader.state_dict(),
                    "data": self._fingerprint,
                },
                config_yaml=to_yaml(self._config),
                phase_end=phase_end,
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
