"""A run's folder -> report.html: one file, no request to anywhere, readable by e-mail and offline.

The page is a function of the records and the configuration in the run's folder alone (no clock, nothing of the machine
that draws it), so the same run gives the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from modernbert_train.effective import Spent, spent
from modernbert_train.provenance import Start, read_starts
from modernbert_train.report.chart import Chart, Event, Line, Marks
from modernbert_train.report.chart import standalone as draw_standalone
from modernbert_train.report.curves import History, StepRecord, read_history, smooth, thin
from modernbert_train.report.evaluations import evaluation_charts, evaluation_table
from modernbert_train.report.events import event_table, what_happened, what_was_done
from modernbert_train.report.page import render, resource, write
from modernbert_train.report.summary import header_note, phase_table, smoothing_window, tiles, warnings, where_text
from modernbert_train.report.trained_by import result_table, start_table
from modernbert_train.results import Result, read_results
from modernbert_train.text import fixed, percent, rate, short, tokens_text, whole


def write_report(run_folder: Path, out: Path | None = None) -> Path:
    """Draw a run from the records and the configuration in its folder.

    Args:
        run_folder: of the run.
        out: the page; None is <run_folder>/report.html.

    Returns:
        The page's path. An older page is replaced whole or not at all.

    Raises:
        DataError: the folder has no metrics.jsonl.
        StorageError: the page cannot be written.
    """
    history = read_history(run_folder / "metrics.jsonl")
    config = run_folder / "config.yaml"
    config_text = config.read_text("utf-8", "replace") if config.is_file() else "This run has no config.yaml."
    page = render_page(
        run_folder.resolve().name,
        history,
        config_text,
        starts=read_starts(run_folder),
        results=read_results(run_folder),
        spent=spent(run_folder),
    )
    return write(out or run_folder / "report.html", page)


def write_loss_svg(run_folder: Path, out: Path) -> Path:
    """Write the loss chart alone, on a white card, as a picture for a README.

    Returns:
        `out`.

    Raises:
        DataError: the folder has no metrics.jsonl.
        StorageError: the picture cannot be written.
    """
    history = read_history(run_folder / "metrics.jsonl")
    marks = marks_of(history)
    subtitle = f"{run_folder.resolve().name}, {tokens_text(marks.end)} tokens"
    return write(out, draw_standalone(loss_chart(history), marks, subtitle, resource("chart.css")))


def render_page(
    name: str,
    history: History,
    config_text: str,
    *,
    starts: Sequence[Start] = (),
    results: Sequence[Result] = (),
    spent: Spent | None = None,
) -> str:
    """Build the page of a run called `name`."""
    shown = [history.steps[i] for i in thin([s.tokens for s in history.steps], [s.loss for s in history.steps])]
    config = f'<details class="box"><summary>Resolved configuration</summary><pre>{escape(config_text)}</pre></details>'
    return render(
        f"{name}: run report",
        name,
        header_note(history.last_time),
        _charts(history),
        marks_of(history),
        places=[(step.tokens, where_text(step)) for step in shown],
        resting=where_text(history.steps[-1]) if history.steps else "",
        above=f"{tiles(history, spent)}\n{warnings(history)}",
        below=f"{phase_table(history)}\n{evaluation_table(history)}\n{result_table(results)}\n"
        f"{event_table(history)}\n{start_table(starts, history.last_time)}\n{config}",
    )


def loss_chart(history: History) -> Chart:
    """Training loss raw and smoothed, validation loss, and the loss of guessing by token frequency."""
    steps, validations = history.steps, history.validations
    x, loss, window = [s.tokens for s in steps], [s.loss for s in steps], smoothing_window(steps)
    lines = [
        Line("each step", "faint", x, loss),
        Line(f"training, mean of {window} steps", "main", x, smooth(loss, window)),
        Line("validation", "points", [v.tokens for v in validations], [v.loss for v in validations]),
        _baseline(history, lambda v: v.unigram_loss),
    ]
    return Chart("Loss, nats per predicted token (log scale)", lines, fixed(3), short, log=True)


def _charts(history: History) -> list[Chart]:
    steps, validations = history.steps, history.validations
    x = [s.tokens for s in steps]

    def exact(name: str, pick: Callable[[StepRecord], float]) -> list[Line]:
        return [Line(name, "main", x, [pick(s) for s in steps])]

    def smoothed(pick: Callable[[StepRecord], float]) -> list[Line]:
        values = [pick(s) for s in steps]
        return [
            Line("each step", "faint", x, values),
            Line("smoothed", "main", x, smooth(values, smoothing_window(steps))),
        ]

    accuracy = [
        Line("validation", "points", [v.tokens for v in validations], [v.accuracy for v in validations]),
        _baseline(history, lambda v: v.unigram_accuracy),
    ]
    charts = [
        loss_chart(history),
        Chart("Accuracy on masked tokens", accuracy, percent(2), percent(1), low=0.0),
        Chart("Learning rate", exact("rate", lambda s: s.lr), rate, rate, low=0.0),
        Chart("Batch size, rows", exact("rows", lambda s: s.rows), whole, whole, low=0.0),
        Chart("Throughput, tokens per second", smoothed(lambda s: s.tokens_per_second), whole, tokens_text, low=0.0),
        Chart("Packing efficiency", smoothed(lambda s: s.packing_efficiency), percent(2), percent(2), high=1.0),
        Chart("Gradient norm (log scale)", smoothed(lambda s: s.grad_norm), short, short, log=True),
    ]
    if any(math.isfinite(step.mfu) for step in steps):
        speed = smoothed(lambda s: s.mfu)
        charts.append(Chart("Model FLOP/s, share of the GPU's peak", speed, percent(2), percent(2), low=0.0))
    if any(math.isfinite(step.data_wait_share) for step in steps):
        waits = smoothed(lambda s: s.data_wait_share)
        charts.append(Chart("Waiting for data, share of the step", waits, percent(2), percent(2), low=0.0))
    return charts + evaluation_charts(history, marks_of(history).end)


def _baseline(history: History, pick: Callable[[Any], float]) -> Line:
    """What guessing reaches, from the left edge to the right one, though it is measured only at validations."""
    known = [(v.tokens, pick(v)) for v in history.validations if math.isfinite(pick(v))]
    if known:
        end = max(known[-1][0], marks_of(history).end)
        known = [(0.0, known[0][1]), *known, (end, known[-1][1])]
    return Line("unigram baseline", "dashed", [x for x, _ in known], [y for _, y in known])


def marks_of(history: History) -> Marks:
    ends = [s.tokens for s in history.steps[-1:]] + [v.tokens for v in history.validations[-1:]]
    ends += [e.tokens for e in history.evaluations[-1:]]
    return Marks(
        end=max(ends + [r.tokens for r in history.restarts], default=0.0),
        boundaries=[(phase.start, phase.name) for phase in history.phases()],
        restarts=[Event(r.tokens, f"restart from {r.checkpoint or 'scratch'}") for r in history.restarts],
        faults=[Event(f.tokens, f"step {f.step:,}: {what_happened(f)}, {what_was_done(f)}") for f in history.faults],
        broken=[s.tokens for s in history.steps if not math.isfinite(s.loss)],
    )
