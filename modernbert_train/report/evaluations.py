"""What `evals` measured, on the page of a run and on that of several: any figures by name, as they stand in the record.

A figure is a chart with a line for each evaluation that has it, its baseline dashed; of several runs each evaluation
has charts of its own. Names are out of a record and may be anything: their number is bounded, and they are escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from modernbert_train.config.evals import BASELINE, COUNT
from modernbert_train.report.chart import Chart, Line
from modernbert_train.report.curves import EvaluationRecord, History
from modernbert_train.text import fixed, short, tokens_text

MOST = 24  # charts, columns of a table, lines of a chart
NUMBER = fixed(3)


def evaluation_charts(history: History, end: float) -> list[Chart]:
    """Of one run, a chart for each figure.

    Args:
        history: of the run.
        end: of the axis, in tokens.
    """
    found = by_figure(history)
    charts = []
    for figure in dict.fromkeys(figure for _, figure in found):
        lines: list[Line] = []
        having = [(name, records) for (name, its), records in found.items() if its == figure]
        for series, (name, records) in enumerate(having[: MOST // 2]):
            x, y = [record.tokens for record in records], [record.figures[figure] for record in records]
            lines.append(Line(name, "main", x, y, series=series))
            baseline = [record.figures.get(f"{BASELINE}{figure}", math.nan) for record in records]
            if any(map(math.isfinite, baseline)):
                guessed = Line(f"{name}, baseline", "dashed", [0.0, *x, end], [baseline[0], *baseline, baseline[-1]])
                lines.append(guessed)
        charts.append(Chart(f"Evaluations: {figure}", lines, NUMBER, short))
    return charts[:MOST]


def compared_charts(histories: Sequence[tuple[str, History]]) -> list[Chart]:
    """Of several runs, given by name, a chart for each figure of each evaluation."""
    found = [by_figure(history) for _, history in histories]
    charts = []
    for name, figure in list(dict.fromkeys(key for each in found for key in each))[:MOST]:
        lines = [
            Line(run, "main", [r.tokens for r in records], [r.figures[figure] for r in records], number)
            for number, ((run, _), each) in enumerate(zip(histories, found, strict=True))
            for records in [each.get((name, figure), [])]
        ]
        charts.append(Chart(f"{name}: {figure}", lines, NUMBER, short))
    return charts


def last_figures(history: History) -> dict[str, float]:
    """'NAME FIGURE' -> its last value."""
    found = list(by_figure(history).items())[:MOST]
    return {f"{name} {figure}": records[-1].figures[figure] for (name, figure), records in found}


def evaluation_table(history: History) -> str:
    """The last value of each figure of a run beside its baseline and its highest; empty where nothing was evaluated."""
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
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    if not rows:
        return ""
    head = "".join(f"<th>{cell}</th>" for cell in ("Evaluation", "Figure", "Last", "Baseline", "Highest", "Of"))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<section class="box wide"><h2>Evaluations</h2>{table}</section>'


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
