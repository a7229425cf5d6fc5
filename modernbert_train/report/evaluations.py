"""Figures of `evals` by name, as they stand in the record.

Each figure of an evaluation is a chart of the page. Names are out of a record and may be anything: their number is
bounded.
"""

from __future__ import annotations

import math

from modernbert_train.config.evals import BASELINE, COUNT
from modernbert_train.core.text import fixed, tokens_text
from modernbert_train.report.curves import EvaluationRecord, History
from modernbert_train.report.table import Table

MOST = 24  # figures of a run
NUMBER = fixed(3)


def last_figures(history: History) -> dict[str, float]:
    """'NAME FIGURE' -> its last value."""
    found = list(by_figure(history).items())[:MOST]
    return {f"{name} {figure}": records[-1].figures[figure] for (name, figure), records in found}


def evaluation_table(history: History) -> Table | None:
    """The last value of each figure of a run beside its baseline and its highest; none where nothing was evaluated."""
    rows = []
    for (name, figure), records in list(by_figure(history).items())[:MOST]:
        last = records[-1]
        known = [record for record in records if math.isfinite(record.figures[figure])] or [last]
        highest = max(known, key=lambda record: record.figures[figure])
        counts = [key for key, value in last.figures.items() if key.startswith(COUNT) and math.isfinite(value)]
        cells = (
            name,
            figure,
            _shown(last.figures[figure]),
            _shown(last.figures.get(f"{BASELINE}{figure}", math.nan)),
            f"{_shown(highest.figures[figure])} at {tokens_text(highest.tokens)}",
            ", ".join(f"{key.removeprefix(COUNT)} {last.figures[key]:,.0f}" for key in counts),
        )
        rows.append(cells)
    heads = ("Evaluation", "Figure", "Last", "Baseline", "Highest", "Of")
    return Table("Evaluations", heads, rows) if rows else None


def by_figure(history: History) -> dict[tuple[str, str], list[EvaluationRecord]]:
    """(evaluation, figure) -> the records that have it, in order; without baselines and counts."""
    found: dict[tuple[str, str], list[EvaluationRecord]] = {}
    for record in history.evaluations:
        for figure in record.figures:
            if not figure.startswith((BASELINE, COUNT)):
                found.setdefault((record.name, figure), []).append(record)
    return found


def _shown(value: float) -> str:
    return NUMBER(value) if math.isfinite(value) else "none"
