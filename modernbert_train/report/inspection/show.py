"""Print one batch of a run as text, and statistics of the rows after it.

The rows come from the same planner and the same masking as in training, keyed by the same seeds, so they are the rows
of the training run, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modernbert_train.batch import Batch
from modernbert_train.clock import Clock
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.microbatches import MicrobatchMaker
from modernbert_train.data.mixture import TokenStreams
from modernbert_train.data.path import open_path
from modernbert_train.data.planner import BatchPlan, BatchPlanner
from modernbert_train.errors import ConfigError
from modernbert_train.objectives import build_objective
from modernbert_train.plan.resolve import resolve
from modernbert_train.report.inspection.figures import length_histogram, mixture_table, packing_lines
from modernbert_train.report.inspection.print_rows import Painter, RowWriter, count_marks, legend

MEASURED_ROWS = 400  # for packing and mixture


def inspect_run(config: RunConfig, number: int, num_rows: int, *, color: bool) -> str:
    """Describe a batch of a run.

    Args:
        config: the run.
        number: of the batch, as steps are counted in metrics.jsonl: from 1.
        num_rows: rows of it to show; fewer if it has fewer.
        color: with ANSI colours.

    Returns:
        The rows with their marks, document lengths, packing and mixture.

    Raises:
        ConfigError: the run has fewer batches.
        RunError: a mistake in it or its data, see `resolve`; or something is damaged.
    """
    facts = resolve(config, purpose="measure").facts
    assert facts is not None
    vocabulary = facts.vocabulary
    objective_of = partial(build_objective, vocabulary=vocabulary)
    data = open_path(config.data, config.seed, Clock.of(config), facts, objective_of)
    plans = _plans_from(data.planned.planner, number)
    plan = next(plans)
    batches = first_microbatches(data.maker, plan, num_rows)
    measured = _measured(plan, plans)

    paint = Painter(color)
    writer = RowWriter(config.data.tokenizer, vocabulary, data.streams, paint)
    shown = list(islice(writer.rows(batches, plan), num_rows))
    sizes = {name: (each.num_tokens, each.num_documents) for name, each in data.planned.chunks.items()}
    return "\n\n".join(
        [
            _heading(config, plan, number, batches, vocabulary.mask_id),
            legend(paint),
            *shown,
            length_histogram(
                _lengths(data.streams, [documents for _, documents in sizes.values()]),
                plan.row_tokens,
                plan.objective.special_tokens,
            ),
            packing_lines(measured),
            mixture_table(config, measured, sizes),
        ]
    )


def first_microbatches(maker: MicrobatchMaker, plan: BatchPlan, num_rows: int) -> list[Batch]:
    """Return the microbatches with the first rows of a batch, as one rank makes them."""
    return list(islice(maker.microbatches(plan.rows, plan), -(-num_rows // plan.microbatch_rows)))


def _plans_from(planner: BatchPlanner, number: int) -> Iterator[BatchPlan]:
    """Yield the plans from a batch on; skipping reads no text."""
    skipped = sum(1 for _ in islice(planner, number - 1))
    first = next(planner, None)
    if first is None:
        raise ConfigError(f"--batch {number}: the run ends with batch {skipped}. Name one from 1 to {skipped}.")
    yield first
    yield from planner


def _measured(first: BatchPlan, following: Iterator[BatchPlan]) -> list[BatchPlan]:
    """Return the batch and the next ones of its phase, until they have MEASURED_ROWS rows."""
    plans, rows = [first], first.num_rows
    while rows < MEASURED_ROWS and (plan := next(following, None)) is not None and plan.phase == first.phase:
        plans.append(plan)
        rows += plan.num_rows
    return plans


def _lengths(streams: TokenStreams, documents: list[int]) -> dict[str, NDArray[Any]]:
    """Return the tokens of each stream's documents, which are numbered through all streams."""
    lengths = np.split(streams.lengths, np.cumsum(documents)[:-1])
    return dict(zip(streams.names, lengths, strict=True))


def _heading(config: RunConfig, plan: BatchPlan, number: int, batches: list[Batch], mask_id: int) -> str:
    counts = count_marks(batches, mask_id)
    predicted = sum(counts.values())
    tokens = sum(batch.num_tokens for batch in batches)
    shares = ", ".join(f"{count / max(1, predicted):.1%} {name}" for name, count in counts.items())
    return (
        f"{config.name}: batch {number:,}, phase {plan.phase}, after {plan.tokens_before:,} tokens: "
        f"{plan.num_rows:,} rows of {plan.row_tokens:,}\n"
        f"{plan.objective.summary}: {predicted:,} of {tokens:,} tokens in "
        f"{len(batches)} microbatch{'es' if len(batches) != 1 else ''}, {shares}"
    )
