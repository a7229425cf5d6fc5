"""Build a plan from a configuration: parameters, documents, and for each phase its steps and FLOPs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from modernbert_train.clock import Clock, Position, is_pythia
from modernbert_train.config.schema import (
    CheckpointConfig,
    ObjectiveConfig,
    PhaseConfig,
    RunConfig,
)
from modernbert_train.data.arrays import read_held_out
from modernbert_train.data.check_shards import check_data
from modernbert_train.data.dataset_card import read_card
from modernbert_train.data.facts import DataFacts, missing_stream
from modernbert_train.data.unigram import held_out_unigram_loss
from modernbert_train.plan.census import Census, census
from modernbert_train.plan.document_lengths import Documents, RowText, read_documents, rows_of
from modernbert_train.plan.expected_loss import Expected, rule_of
from modernbert_train.plan.flops import Flops, flops_per_token
from modernbert_train.plan.gpus import GPUS
from modernbert_train.plan.memory import Memory, Strategy, usable_bytes
from modernbert_train.plan.memory_fit import configured_memory, predicts
from modernbert_train.plan.parameters import Parameters, count_parameters
from modernbert_train.plan.speed import StepTime, Work, step_time
from modernbert_train.plan.speed_settings import on_gpu
from modernbert_train.plan.step_counts import StepRange, crossings, step_ranges, validations
from modernbert_train.plan.teacher_cost import teacher_flops


@dataclass(frozen=True)
class PlannedPhase:
    """One phase of a plan.

    Attributes:
        name: its key in the YAML.
        config: its configuration.
        text: contents of its rows.
        flops: FLOPs of a token that is not padding.
        objective: the objective in this phase.
        ranges: its steps.
    """

    name: str
    config: PhaseConfig
    text: RowText
    flops: Flops
    objective: ObjectiveConfig
    ranges: tuple[StepRange, ...]

    @cached_property
    def steps(self) -> int:
        return sum(part.steps for part in self.ranges)

    @cached_property
    def tokens(self) -> int:
        """Trained tokens, within one batch of the phase's nominal length."""
        return sum(part.steps * part.step_tokens for part in self.ranges)

    @cached_property
    def fill(self) -> float:
        """Share of the tokens in the rows that are not padding."""
        positions = sum(part.steps * part.rows for part in self.ranges) * self.config.row_tokens
        return self.tokens / positions if positions else self.text.fill


@dataclass(frozen=True)
class Plan:
    """The part of a plan that does not depend on the GPU.

    Attributes:
        config: the run.
        ranks: GPUs that would train.
        parameters: the model's.
        documents: the data's.
        phases: in order.
        exact: True if steps are the run's actual batches.
        validations: passes over the held-out text.
        validation_tokens: tokens of one such pass; None if they are unbounded and the data does not exist here.
        milestones: checkpoints kept for good, by checkpoint.interval_tokens and milestones.
        unigram_loss: of the whole held-out text; None without the data, or if the loss rule does not apply.
    """

    config: RunConfig
    ranks: int
    parameters: Parameters
    documents: Documents
    phases: tuple[PlannedPhase, ...]
    exact: bool
    validations: int
    validation_tokens: int | None
    milestones: int
    unigram_loss: float | None = None

    @property
    def bf16(self) -> bool:
        return self.config.compute.precision != "fp32"

    @property
    def census(self) -> Census:
        return census(self.config.model, self.config.objective)

    @property
    def knows_memory(self) -> bool:
        """True if memory is predicted; see `memory_fit.predicts`."""
        return predicts(self.config)

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @property
    def tokens(self) -> int:
        return sum(phase.tokens for phase in self.phases)

    @property
    def expected(self) -> Expected | None:
        """Held-out loss at the end; None without a `unigram_loss`."""
        rule = rule_of(Clock.of(self.config), self.config.optim.name, from_scratch=self.config.from_scratch)
        if rule is None or self.unigram_loss is None or self.validation_tokens is None:
            return None
        largest = max(phase.config.batch_rows * phase.config.row_tokens for phase in self.phases)
        return rule.expect(
            self.parameters.active,
            self.config.total_tokens,
            unigram_loss=self.unigram_loss,
            unique_tokens=sum(stream.tokens for stream in self.documents.streams.values()),
            batch_tokens=largest,
            held_out_tokens=self.validation_tokens,
        )

    def on(self, gpu: str) -> Plan:
        """Return the plan with the open keys filled for this kind of GPU."""
        config = on_gpu(self.config, GPUS[gpu], self.ranks)
        phases = tuple(replace(phase, config=config.phases[phase.name]) for phase in self.phases)
        return replace(self, config=config, phases=phases)

    def memory(self, phase: PlannedPhase, gpu: str) -> Memory:
        """Return the memory of one GPU in a phase as configured."""
        return configured_memory(self.config, phase.name, GPUS[gpu], self.ranks)

    def fits(self, phase: PlannedPhase, gpu: str) -> bool:
        """Return True if the phase as configured fits the GPU, with a reserve."""
        return self.memory(phase, gpu).peak <= usable_bytes(GPUS[gpu])

    def work(self, phase: PlannedPhase) -> Work:
        """Return the work of one rank in a phase."""
        config = self.config
        return Work(
            config.model,
            phase.objective,
            config.compute,
            config.optim,
            phase.config.row_tokens,
            phase.text.tiles,
            phase.text.sequence_tokens,
            phase.fill,
        )

    def step(
        self,
        gpu: str,
        phase: PlannedPhase,
        rows: int,
        *,
        strategy: Strategy | None = None,
        ranks: int | None = None,
        microbatch_rows: int | None = None,
    ) -> StepTime:
        """Return the time of a step.

        Args:
            gpu: key of GPUS.
            phase: phase of the step.
            rows: rows of the global batch.
            strategy, ranks, microbatch_rows: see `step_time`; None: as configured.
        """
        return step_time(
            gpu,
            self.work(phase),
            strategy=strategy or self.config.distributed.strategy,
            ranks=ranks or self.ranks,
            rows=rows,
            microbatch_rows=microbatch_rows or phase.config.microbatch_rows,
            shard_ranks=self.config.distributed.shard_ranks,
        )

    def phase_seconds(self, gpu: str, phase: PlannedPhase) -> float:
        """Return the expected seconds of all steps of a phase."""
        return float(self.phase_times(gpu, phase)[1])

    def phase_times(self, gpu: str, phase: PlannedPhase) -> NDArray[np.float64]:
        """Return the seconds [3] of all steps of a phase, as `StepTime.times`."""
        rows: dict[int, int] = {}
        for part in phase.ranges:
            rows[part.rows] = rows.get(part.rows, 0) + part.steps
        return sum((count * self.step(gpu, phase, size).times for size, count in rows.items()), np.zeros(3))

    def validation_times(self, gpu: str) -> NDArray[np.float64]:
        """Return the seconds [3] of all validations, as `StepTime.times`: forward passes only."""
        last = self.phases[-1]
        step = self.step(gpu, last, last.config.batch_rows)
        return self.validations * (self.validation_tokens or 0) / 3 / step.tokens * step.times


def make_plan(config: RunConfig, ranks: int, median: int | None = None, facts: DataFacts | None = None) -> Plan:
    """Compute everything that does not depend on a GPU.

    Args:
        config: the run, checked.
        ranks: GPUs that would train.
        median: assumed median length of documents; None reads the data if it exists.
        facts: checked facts of the data; None checks the data, if it exists here.

    Raises:
        DataError, ConfigError: the data exists and does not belong to the run.
    """
    data, clock = config.data, Clock.of(config)
    if facts is None and median is None and missing_stream(data) is None:
        facts = check_data(config)
    documents = read_documents(data, median, facts)
    texts = [rows_of(data, now, documents) for now in clock.phases]
    ranges, exact = step_ranges(data, config.seed, clock, documents, [text.fill for text in texts])
    phases = tuple(
        _phase(now, texts[now.index], [each for each in ranges if each.phase == now.index]) for now in clock.phases
    )
    held_out_tokens, unigram_loss = _validation_tokens(config, facts), None
    if (
        facts is not None
        and documents.streams
        and rule_of(clock, config.optim.name, from_scratch=config.from_scratch) is not None
    ):
        unigram_loss = held_out_unigram_loss(data, config.phases.values(), config.model.vocab_size, facts)
    return Plan(
        config=config,
        ranks=ranks,
        parameters=count_parameters(config.model, config.objective),
        documents=documents,
        phases=phases,
        exact=exact,
        validations=0 if data.validation is None else validations(config.eval, clock, ranges, held_out_tokens),
        milestones=_milestones(config.checkpoint, ranges),
        validation_tokens=held_out_tokens,
        unigram_loss=unigram_loss,
    )


def _milestones(settings: CheckpointConfig, ranges: Sequence[StepRange]) -> int:
    crossed = crossings(ranges, settings.interval_tokens)
    if settings.milestones == "pythia":
        crossed += sum(map(is_pythia, range(sum(part.steps for part in ranges) + 1)))
    return crossed


def _validation_tokens(config: RunConfig, facts: DataFacts | None) -> int | None:
    folder, max_tokens = config.data.validation, config.eval.max_tokens
    if facts is not None and facts.validation is not None:
        if config.reads_labels:
            return int(read_held_out(facts.validation.local, max_tokens, whole=True, key=facts.validation.key).sum())
        card = facts.validation.card
    elif folder is not None and Path(folder).is_dir():  # held-out text may exist without training text
        card = read_card(folder)
    else:
        return max_tokens
    return card.tokens if max_tokens is None else min(max_tokens, card.tokens)


def _phase(now: Position, text: RowText, ranges: Sequence[StepRange]) -> PlannedPhase:
    objective = now.objective
    uses = objective.uses_of_heads(text.sequence_tokens)
    encoded = objective.encoded_tokens(text.sequence_tokens)
    flops = flops_per_token(census(now.model, objective), text.spans, uses, encoded, objective.forward_passes)
    flops = replace(flops, teacher=teacher_flops(objective, text.teacher_spans, uses))
    return PlannedPhase(now.name, now.phase, text, flops, objective, tuple(ranges))
