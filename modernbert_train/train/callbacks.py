"""Work around a step: the clock is set, the step is measured, validated, evaluated, saved, a signal is obeyed.

Composer runs callbacks in the order of its list, and build.py lists them in the order in which they stand here: what
a step measured is on disk before the checkpoint that would skip the step is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from composer.core import Callback, Event, State
from composer.loggers import Logger
from torch import Tensor

from modernbert_train.clock import at, is_due, position_at, validates
from modernbert_train.compute import Compute
from modernbert_train.config.schema import DistributedConfig, RunConfig
from modernbert_train.data.facts import DataFacts
from modernbert_train.data.loader import PackedLoader, StepBatch
from modernbert_train.errors import RunError
from modernbert_train.evals import build_evaluators, figures_text
from modernbert_train.evals.heldout import Evaluation, open_validation
from modernbert_train.evals.samples import Samples
from modernbert_train.keyed_random import derive
from modernbert_train.optim.build import apply_clock
from modernbert_train.ranks.group import allow, num_ranks, on_rank_zero, this_rank
from modernbert_train.ranks.heartbeat import passed
from modernbert_train.run.async_scalar import Reading
from modernbert_train.run.before_after import measures_before
from modernbert_train.run.progress import Progress
from modernbert_train.run.record import Record
from modernbert_train.run.throughput import Meter
from modernbert_train.train.adapters import ComposerObjective, adapter_of, inner_model, step_tokens
from modernbert_train.train.step_numbers import CurrentStep, StepNumbers
from modernbert_train.vocabulary import token_ids

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
                f"the data is at {batch.plan.tokens_before} tokens and the clock at {tokens}. They must never "
                "part; please report this with the run's config.yaml."
            )
        position = position_at(self._config, tokens)
        if position.name != self._phase:
            if self._phase is not None and position.phase.reset_moments:
                state.optimizers[0].state.clear()
            self._phase = position.name
        apply_clock(state.optimizers[0], self._config, tokens)
        inner_model(state.model).set_phase(at(self._config, tokens).model)
        key_dropout(self._config, adapter_of(state.model), state.timestamp.batch.value)


def key_dropout(config: RunConfig, adapter: ComposerObjective, steps: int) -> None:
    """Let the next microbatches be those of the step after so many; see `ComposerObjective.begin_step`."""
    adapter.begin_step(derive(config.seed, _DROPOUT, steps))


class Trace(Callback):
    """Tells heartbeat.py where this rank stands, so that a rank that keeps the others waiting can be named.

    In the first step each rank compiles its layers, with a cold cache for many minutes, and the others wait for it. In
    the second one they have met again, so from its end on the usual limit counts.
    """

    def __init__(self, limits: DistributedConfig) -> None:
        self._limits = limits
        self._steps = 0  # of this start

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        passed(f"{event.value} of step {state.timestamp.batch.value}")
        super().run_event(event, state, logger)

    def fit_start(self, state: State, logger: Logger) -> None:
        allow(self._limits.first_step_timeout_seconds, self._limits.timeout_seconds)

    def batch_end(self, state: State, logger: Logger) -> None:
        self._steps += 1
        if self._steps == 2:
            allow(0.0, self._limits.timeout_seconds)


class Measure(Callback):
    """Records each step: what it was made of, what it came to and what it cost.

    The host has been told the loss and the gradient's norm before the update, and nothing here waits for the update:
    the line of a step is written when the norm of its update is there, which on a GPU is while the next step is
    computed.
    """

    def __init__(
        self, config: RunConfig, compute: Compute, step: CurrentStep, record: Record, progress: Progress
    ) -> None:
        self._step = step
        self._record = record
        self._progress = progress
        self._meter = Meter(config, compute)
        self._timeout = config.distributed.timeout_seconds
        self._steps, self._warned = 0, False
        self._started = self._delivered = 0.0

    def before_dataloader(self, state: State, logger: Logger) -> None:
        self._started = time.perf_counter()

    def after_dataloader(self, state: State, logger: Logger) -> None:
        self._delivered = time.perf_counter()

    def after_train_batch(self, state: State, logger: Logger) -> None:
        self._record.flush()  # while the device goes on with what the host has just asked of it

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._step.skipped:  # no step was taken; the guard has recorded why
            return
        batch: StepBatch = state.batch
        numbers = self._step.numbers
        seconds = time.perf_counter() - self._started
        self._warn_of_long_step(seconds)
        optimizer, plan = state.optimizers[0], batch.plan
        update_norm: Tensor | None = getattr(optimizer, "last_update_norm", None)
        counts = {term: sum(part.counts[term] for part in batch.microbatches) for term in plan.objective.terms}
        entry: dict[str, Any] = {
            "kind": "step",
            "step": state.timestamp.batch.value,
            "phase": plan.phase,
            "tokens": state.timestamp.token.value,
            "rows": plan.num_rows,
            "row_tokens": plan.row_tokens,
            "predicted": numbers.predicted,
            "loss": numbers.loss,
            **_terms(numbers),
            "lr": optimizer.param_groups[0]["lr"],
            "grad_norm": numbers.grad_norm,
            "update_norm": None,
            **self._meter.measure(plan, batch.rows, counts, seconds, self._delivered - self._started),
        }
        self._record.step(entry, None if update_norm is None else Reading(update_norm), logger.log_metrics)
        if plan.unused:
            self._record.flush()
            self._progress.line(
                f"the run ends here; {plan.unused:,} tokens of text were waiting for a row and are not trained on"
            )

    def _warn_of_long_step(self, seconds: float) -> None:
        """Once, if the ranks wait for each other hardly longer than a step takes; the first one compiles, too."""
        self._steps += 1
        if self._steps == 1 or self._warned or num_ranks() == 1 or 2 * seconds < self._timeout:
            return
        self._warned = True
        self._progress.line(
            f"warning: distributed.timeout_seconds={self._timeout:g}, and a step has taken {seconds:.1f} s: one "
            f"that takes longer counts as a hang, and ends the run. Set it to {60 * math.ceil(seconds / 3):g}."
        )

    def close(self, state: State, logger: Logger) -> None:
        self._record.flush()
        self._progress.close()


def _terms(numbers: StepNumbers) -> dict[str, float]:
    """Of an objective of several terms, the loss and the count of each."""
    if len(numbers.losses) == 1:
        return {}
    losses = {f"loss/{term}": loss for term, loss in numbers.losses.items()}
    return losses | {f"count/{term}": count for term, count in numbers.counts.items()}


class PlanAhead(Callback):
    """Uses the time in which the device computes, and the host has only to wait, to plan a batch."""

    def __init__(self, loader: PackedLoader) -> None:
        self._loader = loader

    def after_train_batch(self, state: State, logger: Logger) -> None:
        self._loader.plan_ahead()


def measures_first(config: RunConfig, state: State) -> bool:
    """Whether the held-out text is measured now, before the first step; the model is then as in the first phase."""
    if state.timestamp.batch.value or not measures_before(config):
        return False
    inner_model(state.model).set_phase(at(config, 0).model)
    return True


def left_out(config: RunConfig, step: CurrentStep, after: int) -> bool:
    """Whether what is due after a step waits for the next start, since the run was asked to stop and is to save now."""
    return step.numbers.asked.stop and after < config.total_tokens


def missed(kind: str, state: State, read_metrics: Callable[[], list[dict[str, Any]]], name: str | None = None) -> int:
    """At a resume: tokens before the last step, if nothing of a kind has been recorded since; else those after it.

    Args:
        kind: of a line of metrics.jsonl.
        state: before the first step of this process.
        read_metrics: gives the lines; asked on rank 0.
        name: of the line, where there are several of a kind.
    """
    last, now = state.timestamp.batch.value, state.timestamp.token.value

    def before() -> int:
        lines = read_metrics()
        steps = [line for line in lines if line["kind"] == "step" and line["step"] < last]
        measured = [line for line in lines if line["kind"] == kind and line.get("name") == name]
        if not steps or any(line["step"] > steps[-1]["step"] for line in measured):
            return now
        return int(steps[-1]["tokens"])

    return on_rank_zero(before) if last else now


class Validate(Callback):
    """Measures the held-out text, as often as eval: says. The run must hold some out.

    Where a stop signal comes at such a step, the next start measures before its first step: the weights are the same.

    Attributes:
        last: the newest measurement of this process.
    """

    def __init__(
        self,
        config: RunConfig,
        facts: DataFacts,
        compute: Compute,
        record: Record,
        progress: Progress,
        step: CurrentStep,
        read_metrics: Callable[[], list[dict[str, Any]]],
    ) -> None:
        self._config = config
        self._step, self._read_metrics = step, read_metrics
        self._validation = open_validation(config, facts)
        self._samples = None
        if config.eval.samples and this_rank() == 0:
            ids = token_ids(config.data.tokenizer)
            self._samples = Samples(config.eval.samples, ids, facts.vocabulary.pad_id)
        self._compute = compute
        self._record = record
        self._progress = progress
        self.last: Evaluation | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        if measures_first(self._config, state):
            self._measure(state, logger, 0, 0)
        before, after = missed("validation", state, self._read_metrics), state.timestamp.token.value
        if before < after and validates(self._config, self._validation.tokens, before, after):
            inner_model(state.model).set_phase(at(self._config, before).model)
            self._measure(state, logger, before, after)

    def batch_end(self, state: State, logger: Logger) -> None:
        before, after = step_tokens(state)
        due = validates(self._config, self._validation.tokens, before, after)
        if due and not left_out(self._config, self._step, after):
            self._measure(state, logger, before, after)

    def _measure(self, state: State, logger: Logger, before: int, after: int) -> None:
        self._record.flush()
        position = position_at(self._config, before)
        objective = at(self._config, before).objective
        self.last = self._validation.evaluate(
            inner_model(state.model), position.phase, self._compute, objective, self._samples
        )
        found = self.last.as_dict()
        entry = {"kind": "validation", "step": state.timestamp.batch.value, "phase": position.name, "tokens": after}
        self._record.write(entry | found)
        if self._validation.samples:
            self._record.samples(entry | {"kind": "samples", "texts": self._validation.samples})
        self._progress.line(
            f"validation at {after:,} tokens: loss {found['loss']:.3f} (unigram {found['unigram_loss']:.3f}), "
            f"accuracy {found['accuracy']:.1%}"
        )
        logger.log_metrics({f"validation/{key}": value for key, value in found.items()})


class Evaluate(Callback):
    """Takes the other measurements, each as often as its section of evals: says. The run must have some.

    A stop signal is met as `Validate` does.
    """

    def __init__(
        self,
        config: RunConfig,
        compute: Compute,
        record: Record,
        progress: Progress,
        step: CurrentStep,
        read_metrics: Callable[[], list[dict[str, Any]]],
    ) -> None:
        self._config = config
        self._step, self._read_metrics = step, read_metrics
        self._evaluators = build_evaluators(config)
        self._compute = compute
        self._record = record
        self._progress = progress
        for name, evaluator in self._evaluators.items():
            progress.line(f"evals.{name}: {evaluator}")

    def fit_start(self, state: State, logger: Logger) -> None:
        if measures_first(self._config, state):
            for name in self._evaluators:
                self._measure(name, state, logger, 0, 0)
        after = state.timestamp.token.value
        for name in self._evaluators:
            before = missed("evaluation", state, self._read_metrics, name)
            if before < after and is_due(self._config, self._config.evals[name].every_tokens, before, after):
                inner_model(state.model).set_phase(at(self._config, before).model)
                self._measure(name, state, logger, before, after)

    def batch_end(self, state: State, logger: Logger) -> None:
        before, after = step_tokens(state)
        for name in self._evaluators:
            due = is_due(self._config, self._config.evals[name].every_tokens, before, after)
            if due and not left_out(self._config, self._step, after):
                self._measure(name, state, logger, before, after)

    def _measure(self, name: str, state: State, logger: Logger, before: int, after: int) -> None:
        passed(f"the evaluation {name}")
        position, now = position_at(self._config, before), at(self._config, before)
        found = self._evaluators[name](inner_model(state.model), now, position.phase, self._compute)
        step = state.timestamp.batch.value
        entry = {"kind": "evaluation", "step": step, "phase": position.name, "tokens": after}
        self._record.write(entry | {"name": name, "figures": found})
        self._progress.line(f"{name} at {after:,} tokens: {figures_text(found)}")
        logger.log_metrics({f"evals/{name}/{figure}": value for figure, value in found.items()})


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
        except Exception as error:  # all is saved, and `report` draws it again, or tells the bug
            print(f"warning: {self._folder}/report.html could not be drawn: {type(error).__name__}: {error}")
