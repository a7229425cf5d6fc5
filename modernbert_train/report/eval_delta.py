"""Compare held-out figures before the first step of continued pretraining with the last ones.

Both are lines of metrics.jsonl, so the table can be made at any time, also for a run that was resumed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from modernbert_train.clock import Clock
from modernbert_train.config.evals import BASELINE, COUNT
from modernbert_train.config.schema import EvalConfig, ObjectiveConfig, WeightsConfig
from modernbert_train.core.text import table

_HELD_OUT = ("loss", "accuracy")  # figures of a validation line


def measures_before(weights: WeightsConfig, objective: ObjectiveConfig) -> bool:
    """True if a run is measured before its first step: it starts from trained weights and uses no labels."""
    return weights.init_from is not None and not objective.is_labelled


def eval_delta(clock: Clock, settings: EvalConfig, entries: Sequence[dict[str, Any]]) -> str | None:
    """Return the table; None if nothing was measured twice.

    Args:
        clock: of the run.
        settings: its section eval.
        entries: of its metrics.jsonl.
    """
    before: dict[tuple[str, str], float] = {}
    after: dict[tuple[str, str], float] = {}
    for entry in entries:
        for key, value in _figures(entry):
            (after if entry["step"] else before)[key] = value  # the last one counts
    rows = [
        (
            name,
            figure,
            f"{before[name, figure]:.4g}",
            f"{after[name, figure]:.4g}",
            _change(before, after, name, figure),
        )
        for name, figure in before
        if (name, figure) in after
    ]
    if not rows:
        return None
    lines = [table([("measured on", "figure", "before", "after", "change"), *rows], numbers=True)]
    first, last = (clock.phases[at].objective.for_validation() for at in (0, -1))
    if settings.row_tokens is None and len({each.phase.row_tokens for each in clock.phases}) > 1:
        lines.append("Rows were not equally long; set eval.row_tokens to compare like with like.")
    if first != last:
        lines.append("The objective was not the same; the figures do not compare.")
    return "\n".join(lines)


def _figures(entry: dict[str, Any]) -> Iterator[tuple[tuple[str, str], float]]:
    """Yield ((data, figure), value) for each figure in a line."""
    if entry.get("kind") == "validation":
        name, figures = "data.validation", {key: entry.get(key) for key in _HELD_OUT}
    elif entry.get("kind") == "evaluation":
        name, figures = f"evals.{entry.get('name')}", entry.get("figures") or {}
    else:
        return
    for figure, value in figures.items():
        if figure.startswith((BASELINE, COUNT)) or not isinstance(value, int | float):
            continue
        yield (name, figure), value
        if figure == "loss":
            yield (name, "perplexity"), math.exp(min(value, 700.0))


def _change(before: dict[Any, float], after: dict[Any, float], name: str, figure: str) -> str:
    if figure == "perplexity":
        return f"{after[name, figure] / before[name, figure] - 1:+.1%}"
    return f"{after[name, figure] - before[name, figure]:+.4f}"
