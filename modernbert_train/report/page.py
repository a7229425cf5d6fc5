"""The frame of a report: charts with one crosshair over them, in one file that sends no request to anywhere.

Numbers are formatted once, in Python; the script on the page only moves the crosshair and shows the texts it is given.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from modernbert_train.errors import StorageError
from modernbert_train.files import write_whole
from modernbert_train.report.chart import LABEL_ROW, UNITS, Chart, Marks, draw, key_mark, label_rows, legend_entries

NO_REQUESTS = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def render(
    title: str,
    heading: str,
    note: str,
    charts: Sequence[Chart],
    marks: Marks,
    *,
    places: Sequence[tuple[float, str]],
    resting: str,
    above: str = "",
    below: str = "",
    more: str = "",
) -> str:
    """Build a page.

    Args:
        title: of the browser's tab; not HTML, as heading, note, the texts of places, and resting.
        heading, note: the first line.
        charts, marks: what is drawn; faults and losses that are not numbers are marked in the first chart only.
        places: tokens, and what is said of the place where the crosshair is next to them.
        resting: what is said while there is no crosshair.
        above, below: HTML around the charts.
        more: name of a further style sheet and script, without their endings; empty for none.
    """
    figures: list[str] = []
    drawn: list[list[dict[str, Any]]] = []
    for chart in charts:
        figure, lines = _figure(len(drawn), chart, marks, resting)
        figures.append(figure)
        drawn.append(lines)
        marks = replace(marks, broken=(), faults=())
    steps = {"x": [round(x / (marks.end or 1) * UNITS) for x, _ in places], "text": [text for _, text in places]}
    data = json.dumps({"charts": drawn, "steps": steps}, separators=(",", ":")).replace("<", "\\u003c")
    style = "".join(resource(name) for name in ("chart.css", "page.css", *([f"{more}.css"] if more else [])))
    script = resource("page.js") + (resource(f"{more}.js") if more else "")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{NO_REQUESTS}"><link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{style}</style></head>
<body><main{f' class="{more}"' if more else ""}>
<header><h1>{escape(heading)}</h1><p>{escape(note)}</p></header>
{above}
<div class="charts">{"".join(figures)}</div>
{below}
</main>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body></html>
"""


def _figure(number: int, chart: Chart, marks: Marks, where: str) -> tuple[str, list[dict[str, Any]]]:
    """A chart with its caption, and the points that the script needs: one entry per line that has any.

    A line of a run alone has its name, its value and its dot on the chart; runs that share a chart have theirs in the
    one table of the page, and a chart of them has one dot and one label, for the run that is pointed at.
    """
    axes, curves, points = draw(chart, marks)
    drawn = [(line, each) for line, each in zip(chart.lines, points, strict=False) if each.x]
    keys, dots = [], []
    values = [f"<b>{escape(each.text[-1])}</b>" for line, each in drawn if line.run is None]
    entries = [e for e in legend_entries(chart, marks) if points and (e[0] != "restart" or number == 0)]
    values += [""] * (len(entries) - len(values))  # marks of restarts and faults have none
    for (css, name), value in zip(entries, values, strict=True):
        mark = f'<svg viewBox="0 -5 22 10" aria-hidden="true">{key_mark(css)}</svg>'
        keys.append(f"<span>{mark}{escape(name)}{value}</span>")
        dots += [f'<circle class="dot {css}" r="4.5"/>'] * bool(value)
    if any(line.run is not None for line, _ in drawn):
        dots.append('<g class="hot"></g><circle class="dot" r="5"/><text class="label"></text>')
    top = 14 + LABEL_ROW * (1 + max(label_rows(marks), default=-1))
    title, over = escape(chart.title), "by model" if marks.ticks else "over tokens"
    figure = f"""<figure class="box" data-chart="{number}"><figcaption><h2>{title}</h2>
<output class="where" data-last="{escape(where)}">{escape(where)}</output>
<div class="keys">{"".join(keys)}</div></figcaption>
<div class="frame" style="padding-top:{top}px"><svg role="img" aria-label="{title}, {over}">{axes}</svg>
<svg class="curves">{curves}</svg><svg class="over"><line class="cross" y2="100%"/>{"".join(dots)}</svg></div></figure>
"""
    return figure, [p._asdict() | ({} if line.run is None else {"run": line.run}) for line, p in drawn]


def resource(name: str) -> str:
    return files("modernbert_train.report").joinpath(name).read_text("utf-8")


def write(path: Path, text: str) -> Path:
    """Write a file whole or not at all.

    Raises:
        StorageError: it cannot be written; what was there before is untouched.
    """
    try:
        write_whole(path, text)
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written ({error.strerror}). Free space or fix the permission, then repeat."
        ) from error
    return path
