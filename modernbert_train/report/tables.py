"""Tables of a run's page, as text: phases, evaluations, results, faults and restarts, data sources, starts.

Names come from a record and may be anything, so the number of lines and of letters is bounded.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from modernbert_train.checkpoints.evaluations import Result, table_rows
from modernbert_train.checkpoints.provenance import Start, in_words
from modernbert_train.config.evals import BASELINE, COUNT
from modernbert_train.core.text import date, fixed, percent, rate, shorten, tokens_text, whole
from modernbert_train.data.statistics import RunStatistics, SourceCounts
from modernbert_train.report.curves import Fault, History, Restart
from modernbert_train.report.data_json import titled_folders
from modernbert_train.report.training_loss import LOSS_STEPS, training_loss

LOSS, ACCURACY, FIGURE = fixed(3), percent(2), fixed(3)
MAX_FIGURES = 24  # maximum figures of a run's evaluations
_MAX_LINES = 40  # maximum lines of starts, results and events: the last ones
_MAX_PHASES, _MAX_SOURCES = 100, 100
_COMMAND_LETTERS, _NAME_LETTERS = 200, 80


class Table(NamedTuple):
    """Title, heads of the columns, lines of cells, and a sentence before them."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def shown(value: float, form: Callable[[float], str]) -> str:
    """Format a number; `none` if it is not finite."""
    return form(value) if math.isfinite(value) else "none"


def final_loss(losses: NDArray[np.float64]) -> float:
    """Return the training loss at the end; NaN if no loss is finite."""
    loss = training_loss(losses[-LOSS_STEPS:].tolist())
    return math.nan if loss is None else loss


def median(values: NDArray[np.float64]) -> float:
    """Return the median of the finite values; NaN without any."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else math.nan


def run_tables(
    history: History, results: Sequence[Result], data: RunStatistics | None, starts: Sequence[Start]
) -> list[Table]:
    """Return the tables of a run in their order on the page; those without lines are left out."""
    events: list[Fault | Restart] = sorted(
        [*history.restarts, *history.faults], key=lambda event: event.time if math.isfinite(event.time) else 0.0
    )
    tables = (
        Table("Phases", _PHASES, _phases(history)),
        Table("Evaluations", _EVALUATIONS, _evaluations(history)),
        _last("Measured afterwards", ("Checkpoint", "Measured", "Figure", "Value"), table_rows(results)),
        _last("Faults and restarts", _EVENTS, [_event(event) for event in events]),
        Table("Sources of the data", _SOURCES, source_rows(data), "Documents as they were prepared."),
        _last("What trained it", _STARTS, [_start(each) for each in starts], in_words(starts, history.last_time)),
    )
    return [table for table in tables if table.rows]


def _last(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> Table:
    if len(rows) > _MAX_LINES:
        title += f", the last {_MAX_LINES} of {whole(len(rows))}"
    return Table(title, head, rows[-_MAX_LINES:], note)


_PHASES = (
    "Phase", "Tokens", "Steps", "Peak rate", "Rows", "Training loss", "Validation loss", "Accuracy", "Tokens/s",
)  # fmt: skip


def _phases(history: History) -> list[tuple[str, ...]]:
    columns = {name: history.steps.column(name) for name in ("loss", "lr", "rows", "tokens_per_second")}
    lines: list[tuple[str, ...]] = []
    for phase in history.phases()[-_MAX_PHASES:]:
        part = {name: column[phase.first : phase.stop] for name, column in columns.items()}
        checks = [v for v in history.validations if v.phase == phase.name]
        rates, rows = (part[name][np.isfinite(part[name])] for name in ("lr", "rows"))
        ends = dict.fromkeys([whole(float(rows.min())), whole(float(rows.max()))] if len(rows) else [])
        lines.append(
            (
                phase.name,
                tokens_text(phase.end - phase.start),
                whole(phase.stop - phase.first),
                rate(float(rates.max(initial=0.0))),
                " to ".join(ends),
                shown(final_loss(part["loss"]), LOSS),
                LOSS(checks[-1].loss) if checks else "none",
                ACCURACY(checks[-1].accuracy) if checks else "none",
                shown(median(part["tokens_per_second"]), whole),
            )
        )
    return lines


_EVALUATIONS = ("Evaluation", "Figure", "Last", "Baseline", "Highest", "Of")


def _evaluations(history: History) -> list[tuple[str, ...]]:
    """Return the last value of each figure with its baseline and its highest."""
    lines: list[tuple[str, ...]] = []
    for (name, figure), records in list(history.by_figure().items())[:MAX_FIGURES]:
        last = records[-1].figures
        finite = [record for record in records if math.isfinite(record.figures[figure])] or [records[-1]]
        highest = max(finite, key=lambda record: record.figures[figure])
        counts = [key for key, value in last.items() if key.startswith(COUNT) and math.isfinite(value)]
        lines.append(
            (
                name,
                figure,
                shown(last[figure], FIGURE),
                shown(last.get(f"{BASELINE}{figure}", math.nan), FIGURE),
                f"{shown(highest.figures[figure], FIGURE)} at {tokens_text(highest.tokens)}",
                ", ".join(f"{key.removeprefix(COUNT)} {last[key]:,.0f}" for key in counts),
            )
        )
    return lines


_EVENTS = ("When", "Step", "Tokens", "What", "Loss", "What was done")


def _event(event: Fault | Restart) -> tuple[str, ...]:
    loss = LOSS(event.loss) if isinstance(event, Fault) else ""
    return (date(event.time), whole(event.step), tokens_text(event.tokens, 4), event.what, loss, event.action_text)


_SOURCES = ("Source", "Read", "Documents", "Tokens", "Duplicates", "Near duplicates", "Left out otherwise")


def source_rows(data: RunStatistics | None) -> list[tuple[str, ...]]:
    """Return a line for each source: its documents that were read, written and left out."""
    rows: dict[tuple[str, SourceCounts], None] = {}  # list a source once, even if it is in several streams
    for _, folder in titled_folders(data):
        rows |= dict.fromkeys(folder.sources.items())
    return [
        (
            shorten(name, _NAME_LETTERS),
            *map(whole, (each.read, each.documents)),
            tokens_text(each.tokens),
            *map(whole, (each.duplicates, each.near_duplicates, each.left_out)),
        )
        for name, each in list(rows)[:_MAX_SOURCES]
    ]


_STARTS = ("Started", "Ended", "How", "From", "Program and machine", "Host", "Command")


def _start(start: Start) -> tuple[str, ...]:
    return (
        date(start.time),
        "" if start.ended is None else date(start.ended),
        f"{start.outcome or 'no end recorded'}{f': {start.error}' if start.error else ''}",
        f"{tokens_text(start.tokens)} tokens",
        start.program,
        start.host,
        shorten(shlex.join(start.command), _COMMAND_LETTERS),
    )
