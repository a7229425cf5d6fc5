"""Measure held-out loss and the run's `evals` during training, as often as configured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from composer.core import State

from modernbert_train.clock import Clock
from modernbert_train.config.schema import EvaluatorConfig
from modernbert_train.distributed.compute import Compute
from modernbert_train.distributed.group import on_rank_zero, this_rank
from modernbert_train.distributed.heartbeat import post_heartbeat
from modernbert_train.evaluate.evaluators import Evaluator, build_evaluators, figures_text
from modernbert_train.evaluate.heldout import Evaluation, HeldOutTexts
from modernbert_train.evaluate.samples import Samples
from modernbert_train.models.encoder import OnEncoder
from modernbert_train.plan.expected_loss import Rule
from modernbert_train.plan.parameters import count_parameters
from modernbert_train.report.progress import Progress
from modernbert_train.report.record import Record
from modernbert_train.train.adapters import inner_model
from modernbert_train.vocabulary import token_ids

Entry = dict[str, Any]  # a line of metrics.jsonl


class Measurement(ABC):
    """Base class of periodic measurements.

    Attributes:
        kind, name: both identify its lines in metrics.jsonl.
    """

    kind: str
    name: str | None = None

    def __init__(self, clock: Clock, compute: Compute, record: Record, progress: Progress) -> None:
        self.clock, self.compute, self.record, self.progress = clock, compute, record, progress

    @abstractmethod
    def is_due(self, before: int, after: int) -> bool:
        """Return True if it is due after a step between these two counts of global tokens."""

    @abstractmethod
    def take(self, model: OnEncoder, before: int, entry: Entry) -> Entry:
        """Measure, record and print; every rank calls this.

        Args:
            model: set to the phase of the step.
            before: global tokens before the step.
            entry: first fields of its line: kind, step, phase, tokens.

        Returns:
            Metrics for the loggers.
        """


class HeldOut(Measurement):
    """Loss and accuracy on held-out text.

    Attributes:
        last: the newest result in this process.
    """

    kind = "validation"

    def __init__(self, texts: HeldOutTexts, *arguments: Any, rule: Rule | None) -> None:
        super().__init__(*arguments)
        self._settings, self._validation = texts.eval, texts.validation()
        self._samples = None
        if texts.eval.samples and this_rank() == 0:
            ids = token_ids(texts.data.tokenizer)
            self._samples = Samples(texts.eval.samples, ids, texts.facts.vocabulary.pad_id)
        self.last: Evaluation | None = None
        self._rule = rule
        self._unique_tokens = sum(folder.card.tokens for folder in texts.facts.streams.values())

    def is_due(self, before: int, after: int) -> bool:
        return self.clock.validates(self._settings, self._validation.tokens, before, after)

    def take(self, model: OnEncoder, before: int, entry: Entry) -> Entry:
        self.last = self._validation.evaluate(model, self.clock.at(before), self.compute, self._samples)
        measured = self.last.as_dict()
        self.record.write(entry | measured)
        if self._validation.samples:
            self.record.samples(entry | {"kind": "samples", "texts": self._validation.samples})
        self.progress.line(
            f"validation at {entry['tokens']:,} tokens: loss {measured['loss']:.3f} (unigram "
            f"{measured['unigram_loss']:.3f}), accuracy {measured['accuracy']:.1%}"
        )
        self._warn_once(measured, entry)
        return {f"validation/{key}": value for key, value in measured.items()}

    def _warn_once(self, measured: Entry, entry: Entry) -> None:
        """Warn once if the run is far behind comparable runs; training continues."""
        first = self.clock.phases[0]
        if self._rule is None or entry["tokens"] < 10 * first.phase.schedule.warmup_tokens:
            return
        warning = self._rule.behind(
            measured["loss"],
            count_parameters(first.model, first.objective).active,
            entry["tokens"],
            entry["step"],
            unigram_loss=measured["unigram_loss"],
            unique_tokens=self._unique_tokens,
            held_out_tokens=self._validation.tokens,
        )
        if warning is not None:
            self._rule = None
            self.progress.line(f"warning: {warning}")


class Evaluated(Measurement):
    """Metrics of one section of `evals`."""

    kind = "evaluation"

    def __init__(self, name: str, every_tokens: int | None, evaluator: Evaluator, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.name, self._every_tokens, self._evaluator = name, every_tokens, evaluator
        self.progress.line(f"evals.{name}: {evaluator}")

    def is_due(self, before: int, after: int) -> bool:
        return self.clock.is_due(self._every_tokens, before, after)

    def take(self, model: OnEncoder, before: int, entry: Entry) -> Entry:
        post_heartbeat(f"the evaluation {self.name}")
        figures = self._evaluator(model, self.clock.at(before), self.compute)
        self.record.write(entry | {"name": self.name, "figures": figures})
        self.progress.line(f"{self.name} at {entry['tokens']:,} tokens: {figures_text(figures)}")
        return {f"evals/{self.name}/{figure}": value for figure, value in figures.items()}


class Measurements:
    """All periodic measurements of a run.

    Args:
        texts: opens the run's held-out texts.
        evals: the run's section `evals`.
        clock: the run's clock.
        compute: device and precision.
        record, progress: receive the results.
        read_metrics: returns the lines of metrics.jsonl; called on rank 0.
        log: sends numbers to the loggers.
        rule: predicts held-out losses of such a run; None: no rule applies.
        at_first: also measure before the first step.
    """

    def __init__(
        self,
        texts: HeldOutTexts,
        evals: Mapping[str, EvaluatorConfig],
        clock: Clock,
        compute: Compute,
        record: Record,
        progress: Progress,
        read_metrics: Callable[[], list[Entry]],
        log: Callable[[Entry], None],
        *,
        rule: Rule | None,
        at_first: bool,
    ) -> None:
        shared = (clock, compute, record, progress)
        self._clock, self._record, self._read_metrics, self._log = clock, record, read_metrics, log
        self._at_first = at_first
        self._held_out = None
        if texts.facts.validation is not None:
            self._held_out = HeldOut(texts, *shared, rule=rule)
        built = build_evaluators(evals, texts)
        evaluated = [Evaluated(name, evals[name].every_tokens, each, *shared) for name, each in built.items()]
        self._all: list[Measurement] = [*([] if self._held_out is None else [self._held_out]), *evaluated]

    @property
    def held_out(self) -> Evaluation | None:
        """The newest held-out result of this process."""
        return None if self._held_out is None else self._held_out.last

    def before_steps(self, state: State) -> None:
        """At the start, measure pretrained weights, and measurements that an earlier stop left out."""
        model, step = inner_model(state.model), state.timestamp.batch.value
        if step == 0 and self._at_first:
            model.set_phase(self._clock.phases[0].model)
            for each in self._all:
                self._take(each, model, 0, 0, 0)
        after = state.timestamp.token.value
        for each in self._all if step else ():
            before = self._missed(each, step, after)
            if before < after and each.is_due(before, after):
                model.set_phase(self._clock.at(before).model)
                self._take(each, model, step, before, after)

    def after_step(self, model: OnEncoder, step: int, before: int, after: int) -> None:
        """Take the measurements that are due.

        Args:
            model: the model after the step.
            step: number of the step, from 1.
            before, after: global tokens before and after the step.
        """
        for each in self._all:
            if each.is_due(before, after):
                self._take(each, model, step, before, after)

    def _take(self, each: Measurement, model: OnEncoder, step: int, before: int, after: int) -> None:
        self._record.flush()
        phase = self._clock.at(before).name
        self._log(each.take(model, before, {"kind": each.kind, "step": step, "phase": phase, "tokens": after}))

    def _missed(self, each: Measurement, step: int, now: int) -> int:
        """Return tokens before the last step if a due measurement is missing from the record; otherwise `now`."""

        def before() -> int:
            lines = self._read_metrics()
            steps = [line for line in lines if line["kind"] == "step" and line["step"] < step]
            measured = [line for line in lines if line["kind"] == each.kind and line.get("name") == each.name]
            if not steps or any(line["step"] > steps[-1]["step"] for line in measured):
                return now
            return int(steps[-1]["tokens"])

        return on_rank_zero(before)
