"""The steps of a run: every batch as the planner would make it where the data is small, else by the clock.

A run is a list of ranges of equal batches. Batches are counted by the functions that training itself uses
(position_at, batch_rows_at), so a batch that crosses a boundary belongs to the phase in which it starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from modernbert_train.clock import position_at, validations_in
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.batch_warmup import batch_rows_at
from modernbert_train.data.path import plan_path
from modernbert_train.plan.documents import Documents

EXACT_TOKENS = 100_000_000  # longest run whose every batch is planned; takes about a second


@dataclass(frozen=True)
class StepRange:
    """Equal steps in a row.

    Attributes:
        phase: number of the phase, from 0.
        start: global tokens before the first of them.
        steps: how many.
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


def step_ranges(config: RunConfig, documents: Documents, fills: Sequence[float]) -> tuple[list[StepRange], bool]:
    """All steps of a run, from its first token.

    Args:
        config: the run.
        documents: its documents.
        fills: for each phase, the share of a row that is not padding.

    Returns:
        The ranges in order, and whether they are the very batches of the run rather than batches of mean size.
    """
    only = documents.streams.get("train")
    if config.data.train is not None and only is not None and only.is_whole and config.total_tokens <= EXACT_TOKENS:
        return list(_planned(config, documents)), True
    return list(_by_clock(config, fills)), False


def _planned(config: RunConfig, documents: Documents) -> Iterator[StepRange]:
    numbers = {name: index for index, name in enumerate(config.phases)}
    for plan in plan_path(config, documents.streams).planner:
        yield StepRange(numbers[plan.phase], plan.tokens_before, 1, plan.num_rows, plan.tokens)


def _by_clock(config: RunConfig, fills: Sequence[float]) -> Iterator[StepRange]:
    ends = np.cumsum([phase.tokens for phase in config.phases.values()]).tolist()
    tokens = 0
    while tokens < config.total_tokens:
        position = position_at(config, tokens)
        phase, warmup = position.phase, position.phase.batch_warmup
        rows = batch_rows_at(phase, position.tokens)
        step_tokens = max(1, round(rows * phase.row_tokens * fills[position.index]))
        full = warmup is None or position.tokens >= warmup.tokens
        steps = -(-(ends[position.index] - tokens) // step_tokens) if full else 1
        part = StepRange(position.index, tokens, steps, rows, step_tokens)
        yield part
        tokens = part.end


def crossings(ranges: Sequence[StepRange], interval_tokens: int | None) -> int:
    """Steps of a run that pass a multiple of an interval; None is never."""
    if interval_tokens is None:
        return 0
    return sum(
        part.steps
        if part.step_tokens >= interval_tokens
        else part.end // interval_tokens - part.start // interval_tokens
        for part in ranges
    )


def validations(config: RunConfig, ranges: Sequence[StepRange], held_out_tokens: int | None) -> int:
    """Steps after which the held-out text is measured; see clock.validates.

    Args:
        config: the run.
        ranges: its steps.
        held_out_tokens: that one validation reads; None if that is not known.
    """
    if config.eval.interval_tokens is not None:
        return crossings_or_ends(ranges, config.eval.interval_tokens)
    found, begin = 0, 0
    for index, phase in enumerate(config.phases.values()):
        parts = validations_in(phase, config.eval, held_out_tokens)
        for part in (each for each in ranges if each.phase == index):
            if parts * part.step_tokens >= phase.tokens:
                found += part.steps
            else:
                found += parts * (part.end - begin) // phase.tokens - parts * (part.start - begin) // phase.tokens
        begin += phase.tokens
    return found


def crossings_or_ends(ranges: Sequence[StepRange], interval_tokens: int | None) -> int:
    """Steps that pass a multiple of an interval, or end a phase, or both."""
    last_steps = [
        part for index, part in enumerate(ranges) if index + 1 == len(ranges) or ranges[index + 1].phase != part.phase
    ]
    ends = [StepRange(last.phase, last.end - last.step_tokens, 1, last.rows, last.step_tokens) for last in last_steps]
    return crossings(ranges, interval_tokens) + len(ends) - crossings(ends, interval_tokens)
