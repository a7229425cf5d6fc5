"""Draw a table of models and tasks as SVG: a line for each task, a dot for each model with its deviation over seeds.

The picture depends on the table alone, contains no script, and draws its background, so it fits into a paper and on a
page of any colour. Published figures are rings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from modernbert_train.core.text import printable, shorten

_COLOURS = ("#115cc6", "#e75f1e", "#078965", "#be679a", "#724e00", "#009cd6", "#5b6472")
_WIDTH, _LEFT, _RIGHT = 860, 210, 24
_STEP, _GAP = 13, 14  # pixels from dot to dot, and between tasks
_LETTERS = 30


class _Dot(NamedTuple):
    model: int
    percent: float
    deviation: float


def draw_dot_plot(columns: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the picture of the columns and rows in table.json. Cells without a mean are left out."""
    dots = [
        [
            _Dot(model, 100 * cell["mean"], 100 * (cell["standard_deviation"] or 0.0))
            for model, row in enumerate(rows)
            if (cell := row["cells"][index]) is not None and cell["mean"] is not None
        ]
        for index in range(len(columns))
    ]
    ends = [dot.percent + side * dot.deviation for each in dots for dot in each for side in (-1, 1)]
    lowest, highest = min(ends, default=0.0), max(ends, default=100.0)
    tick = next((each for each in (1, 2, 5, 10, 20) if highest - lowest <= 10 * each), 50)
    low = tick * math.floor(lowest / tick)
    high = max(tick * math.ceil(highest / tick), low + tick)

    def x(percent: float) -> float:
        return round(_LEFT + (percent - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT), 1)

    marks, top = [], 16.0
    for model, row in enumerate(rows):
        marks.append(_mark(_LEFT, top, model, row) + _text(_LEFT + 12, top, shorten(str(row["model"]), 2 * _LETTERS)))
        top += 18
    begun = top = top + 8
    for column, each in zip(columns, dots, strict=True):
        height = max(1, len(each)) * _STEP + _GAP
        name = shorten(f"{column['task']}, {column['metric']}", _LETTERS)
        marks.append(_text(_LEFT - 12, top + height / 2, name, "end"))
        marks.append(_line(_LEFT, top + height, _WIDTH - _RIGHT, top + height, "#dfe3e9"))
        for index, dot in enumerate(each):
            y = top + _GAP / 2 + (index + 0.5) * _STEP
            ends_at = x(dot.percent - dot.deviation), x(dot.percent + dot.deviation)
            marks.append(_line(ends_at[0], y, ends_at[1], y, _COLOURS[dot.model % len(_COLOURS)]))
            marks.append(_mark(x(dot.percent), y, dot.model, rows[dot.model]))
        top += height
    ticks = [low + number * tick for number in range(round((high - low) / tick) + 1)]
    grid = "".join(_line(x(each), begun, x(each), top, "#e6e9ee") for each in ticks)
    below = "".join(_text(x(each), top + 16, f"{each:g}", "middle") for each in ticks)
    title = "In percent: mean and standard deviation over seeds"
    rings = "; rings are published" if any(row.get("published") for row in rows) else ""
    below += _text((_LEFT + _WIDTH - _RIGHT) / 2, top + 36, title + rings, "middle")
    size = f'viewBox="0 0 {_WIDTH} {top + 50:g}" width="{_WIDTH}" height="{top + 50:g}"'
    font = 'font-family="system-ui, -apple-system, Segoe UI, Roboto, Arial, sans-serif" font-size="12" fill="#1c2330"'
    card = '<rect width="100%" height="100%" fill="#ffffff"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} role="img" aria-label="{escape(title)}">'
    return f"{head}{card}{grid}{''.join(marks)}{below}</svg>\n"


def _mark(x: float, y: float, model: int, row: Mapping[str, Any]) -> str:
    colour = _COLOURS[model % len(_COLOURS)]
    fill = "#ffffff" if row.get("published") else colour
    return f'<circle cx="{x:g}" cy="{y:g}" r="4" fill="{fill}" stroke="{colour}" stroke-width="2"/>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke="{colour}" stroke-width="1.5"/>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y + 4:g}" text-anchor="{anchor}">{escape(printable(text))}</text>'
