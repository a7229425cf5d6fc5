"""The steps of a run: planned batch by batch if the data is small, otherwise computed by the clock.

A run is a list of ranges of equal batches. Batches are counted by the functions that training itself uses
(Clock.at, batch_rows_at), so a batch that crosses a boundary belongs to the phase in which it starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from modernbert_train.clock import Clock, validations_in
from modernbert_train.config.schema import DataConfig, EvalConfig
from modernbert_train.data.batch_warmup import batch_rows_at
from modernbert_train.data.path import plan_path
from modernbert_train.plan.document_lengths import Documents

EXACT_TOKENS = 100_000_000  # longest run whose batches are all planned; takes about a second


@dataclass(frozen=True)
class StepRange:
    """Consecutive steps of equal size.

    Attributes:
        phase: index of the phase, from 0.
        start: global tokens before the first of them.
        steps: number of steps.
        rows: rows of each, over all ranks.
        step_tokens: tokens of each that are not padding.
    """

    phase: int
    start: int
    steps: int
    rows: int
    step_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.steps * self.step_tokens


def step_ranges(
    data: DataConfig, seed: int, clock: Clock, documents: Documents, fills: Sequence[float]
) -> tuple[list[StepRange], bool]:
    """Return all steps of a run, from its first token.

    Args:
        data, seed, clock: the run's.
        documents: its documents.
        fills: for each phase, the share of a row that is not padding.

    Returns:
        The ranges in order, and True if they are the run's actual batches rather than batches of mean size.
    """
    only = documents.streams.get("train")
    if data.train is not None and only is not None and only.is_whole and clock.total_tokens <= EXACT_TOKENS:
        numbers = {each.name: each.index for each in clock.phases}
        plans = plan_path(data, seed, clock, documents.streams).planner
        ranges = [StepRange(numbers[p.phase], p.tokens_before, 1, p.num_rows, p.tokens) for p in plans]
        return ranges, True
    return list(_by_clock(clock, fills)), False


def _by_clock(clock: Clock, fills: Sequence[float]) -> Iterator[StepRange]:
    ends = np.cumsum([each.phase.tokens for each in clock.phases]).tolist()
    tokens, total = 0, clock.total_tokens
    while tokens < total:
        position = clock.at(tokens)
        phase, warmup = position.phase, position.phase.batch_warmup
        rows = batch_rows_at(phase, position.tokens)
        step_tokens = max(1, round(rows * phase.row_tokens * fills[position.index]))
        full = warmup is None or position.tokens >= warmup.tokens
        steps = -(-(ends[position.index] - tokens) // step_tokens) if full else 1
        part = StepRange(position.index, tokens, steps, rows, step_tokens)
        yield part
        tokens = part.end


def crossings(ranges: Sequence[StepRange], interval_tokens: int | None) -> int:
    """Count the steps of a run that pass a multiple of an interval; None means never."""
    if interval_tokens is None:
        return 0
    return sum(
        part.steps
        if part.step_tokens >= interval_tokens
        else part.end // interval_tokens - part.start // interval_tokens
        for part in ranges
    )


def validations(settings: EvalConfig, clock: Clock, ranges: Sequence[StepRange], held_out_tokens: int | None) -> int:
    """Count the steps after which the held-out text is measured; see Clock.validates.

    Args:
        settings, clock: the run's.
        ranges: its steps.
        held_out_tokens: tokens that one validation reads; None if unknown.
    """
    if settings.interval_tokens is not None:
        return crossings_or_ends(ranges, settings.interval_tokens)
    count, begin = 0, 0
    for now in clock.phases:
        num_validations, tokens = validations_in(now.phase, settings, held_out_tokens), now.phase.tokens
        for part in (each for each in ranges if each.phase == now.index):
            if num_validations * part.step_tokens >= tokens:
                count += part.steps
            else:
                count += (
                    num_validations * (part.end - begin) // tokens - num_validations * (part.start - begin) // tokens
                )
        begin += tokens
    return count


def crossings_or_ends(ranges: Sequence[StepRange], interval_tokens: int | None) -> int:
    """Count the steps that pass a multiple of an interval or end a phase."""
    last_steps = [
        part for index, part in enumerate(ranges) if index + 1 == len(ranges) or ranges[index + 1].phase != part.phase
    ]
    ends = [StepRange(last.phase, last.end - last.step_tokens, 1, last.rows, last.step_tokens) for last in last_steps]
    return crossings(ranges, interval_tokens) + len(ends) - crossings(ends, interval_tokens)
