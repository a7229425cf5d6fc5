"""A run's folder -> report.html: one file, no request to anywhere, readable by e-mail and offline.

The page is a function of metrics.jsonl and config.yaml alone (no clock, no host name), so the same run gives the same
bytes. Numbers are formatted once, in Python; the script on the page only moves a crosshair over them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from modernbert_train.errors import StorageError
from modernbert_train.report.chart import UNITS, Chart, Line, Marks, draw, key_mark, label_rows, legend_entries
from modernbert_train.report.chart import standalone as draw_standalone
from modernbert_train.report.curves import History, StepRecord, read_history, smooth, thin
from modernbert_train.report.summary import header_note, phase_table, smoothing_window, tiles, warnings, where_text
from modernbert_train.report.text import fixed, percent, rate, short, tokens_text, whole

NO_REQUESTS = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def write_report(run_folder: Path) -> Path:
    """Write <run_folder>/report.html from the metrics and configuration beside it.

    Returns:
        The page's path. An older page is replaced whole or not at all.

    Raises:
        DataError: the folder has no metrics.jsonl.
        StorageError: the page cannot be written.
    """
    history = read_history(run_folder / "metrics.jsonl")
    config = run_folder / "config.yaml"
    config_text = config.read_text("utf-8", "replace") if config.is_file() else "This run has no config.yaml."
    return _write(run_folder / "report.html", render_page(run_folder.resolve().name, history, config_text))


def write_loss_svg(run_folder: Path, out: Path) -> Path:
    """Write the loss chart alone, on a white card, as a picture for a README.

    Returns:
        `out`.

    Raises:
        DataError: the folder has no metrics.jsonl.
        StorageError: the picture cannot be written.
    """
    history = read_history(run_folder / "metrics.jsonl")
    marks = _marks(history)
    subtitle = f"{run_folder.resolve().name}, {tokens_text(marks.end)} tokens"
    return _write(out, draw_standalone(loss_chart(history), marks, subtitle, _resource("chart.css")))


def render_page(name: str, history: History, config_text: str) -> str:
    """Build the page of a run called `name`."""
    marks = _marks(history)
    figures: list[str] = []
    drawn: list[list[dict[str, Any]]] = []
    last = where_text(history.steps[-1]) if history.steps else ""
    for chart in _charts(history):
        figure, lines = _figure(len(drawn), chart, marks, last)
        figures.append(figure)
        marks = replace(marks, broken=())  # losses that are not numbers belong to the first chart
        drawn.append(lines)
    shown = [history.steps[i] for i in thin([s.tokens for s in history.steps], [s.loss for s in history.steps])]
    steps = {"x": [round(s.tokens / (marks.end or 1) * UNITS) for s in shown], "text": [where_text(s) for s in shown]}
    data = json.dumps({"charts": drawn, "steps": steps}, separators=(",", ":")).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{NO_REQUESTS}"><link rel="icon" href="data:,">
<title>{escape(name)}: run report</title>
<style>{_resource("chart.css")}{_resource("page.css")}</style></head>
<body><main>
<header><h1>{escape(name)}</h1><p>{header_note(history)}</p></header>
{tiles(history)}
{warnings(history)}
<div class="charts">{"".join(figures)}</div>
{phase_table(history)}
<details class="box"><summary>Resolved configuration</summary><pre>{escape(config_text)}</pre></details>
</main>
<script type="application/json" id="data">{data}</script>
<script>{_resource("page.js")}</script>
</body></html>
"""


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
    return [
        loss_chart(history),
        Chart("Accuracy on masked tokens", accuracy, percent(2), percent(1), low=0.0),
        Chart("Learning rate", exact("rate", lambda s: s.lr), rate, rate, low=0.0),
        Chart("Batch size, rows", exact("rows", lambda s: s.rows), whole, whole, low=0.0),
        Chart("Throughput, tokens per second", smoothed(lambda s: s.tokens_per_second), whole, tokens_text, low=0.0),
        Chart("Packing efficiency", smoothed(lambda s: s.packing_efficiency), percent(2), percent(2), high=1.0),
        Chart("Gradient norm (log scale)", smoothed(lambda s: s.grad_norm), short, short, log=True),
    ]


def _baseline(history: History, pick: Callable[[Any], float]) -> Line:
    """What guessing reaches, from the left edge to the right one, though it is measured only at validations."""
    known = [(v.tokens, pick(v)) for v in history.validations if math.isfinite(pick(v))]
    if known:
        end = max(known[-1][0], _marks(history).end)
        known = [(0.0, known[0][1]), *known, (end, known[-1][1])]
    return Line("unigram baseline", "dashed", [x for x, _ in known], [y for _, y in known])


def _marks(history: History) -> Marks:
    ends = [s.tokens for s in history.steps[-1:]] + [v.tokens for v in history.validations[-1:]]
    return Marks(
        end=max(ends + [r.tokens for r in history.restarts], default=0.0),
        borders=[(phase.start, phase.name) for phase in history.phases()],
        restarts=[(r.tokens, f"restart from {r.checkpoint or 'scratch'}") for r in history.restarts],
        broken=[s.tokens for s in history.steps if not math.isfinite(s.loss)],
    )


def _figure(number: int, chart: Chart, marks: Marks, where: str) -> tuple[str, list[dict[str, Any]]]:
    """A chart with its caption, and the points that the script needs: one entry per line that has any."""
    content, points = draw(chart, marks)
    points = [p for p in points if p.x]
    keys, dots = [], []
    entries = [e for e in legend_entries(chart, marks) if points and (e[0] != "restart" or number == 0)]
    for i, (kind, name) in enumerate(entries):
        value = f"<b>{escape(points[i].text[-1])}</b>" if i < len(points) else ""
        mark = f'<svg viewBox="0 -5 22 10" aria-hidden="true">{key_mark(kind)}</svg>'
        keys.append(f"<span>{mark}{escape(name)}{value}</span>")
        dots += [f'<circle class="dot {kind}" r="4.5"/>'] * (i < len(points))
    rows = min(max(label_rows(marks), default=0), 3)
    title = escape(chart.title)
    figure = f"""<figure class="box" data-chart="{number}"><figcaption><h2>{title}</h2>
<output class="where" data-last="{escape(where)}">{escape(where)}</output>
<div class="keys">{"".join(keys)}</div></figcaption>
<div class="frame rows-{rows}"><svg role="img" aria-label="{title}, over tokens">{content}
<line class="cross" y2="100%"/>{"".join(dots)}</svg></div></figure>
"""
    return figure, [p._asdict() for p in points]


def _resource(name: str) -> str:
    return files("modernbert_train.report").joinpath(name).read_text("utf-8")


def _write(path: Path, text: str) -> Path:
    new = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with new.open("w", encoding="utf-8", errors="replace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise StorageError(
            f"{path}: cannot be written ({error.strerror}). Free space or mend the permission, then repeat."
        ) from error
    return path
