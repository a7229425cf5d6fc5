"""Parallel coordinates: one vertical axis for each key and one for the figure, one line for each completed trial.

Drawn with the axes and colours of a run's report (report/chart.py). The best trial stands out; the others fade with
their rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from launch.sweeps.rows import TrialRow, param_text
from modernbert_train.report.chart import Chart, Line, Scale
from modernbert_train.text import short

LEFT, RIGHT, TOP, BOTTOM = 90, 90, 92, 32  # px around the axes
_STYLE = (
    "path.trial { stroke: var(--main); stroke-width: 1.5 } path.best { stroke: var(--dots); stroke-width: 3 } "
    "circle.best { fill: var(--dots) } text.axis-name { fill: var(--ink); font-weight: 600 } "
    "text.value { paint-order: stroke; stroke: var(--card); stroke-width: 3px }"
)


@dataclass(frozen=True)
class Axis:
    """One vertical axis.

    Attributes:
        name: above it.
        heights: value of each row, from 0 at the bottom to 1.
        ticks: (height, text).
    """

    name: str
    heights: Sequence[float]
    ticks: Sequence[tuple[float, str]]


def parallel_svg(
    rows: Sequence[TrialRow],
    distributions: dict[str, BaseDistribution],
    objective: str,
    title: str,
    style: str,
    width: int = 1000,
    height: int = 420,
) -> str:
    """Draw it.

    Args:
        rows: completed trials, the best first; at least one.
        distributions: the keys, in order.
        objective: name of the figure.
        title: of the picture.
        style: CSS of the charts; empty where the page has it.
        width, height: size in px.
    """
    axes = [_key_axis(key, distribution, rows) for key, distribution in distributions.items()]
    axes.append(_number_axis(objective, [row.value or 0.0 for row in rows], log=False))
    step = (width - LEFT - RIGHT) / (len(axes) - 1)
    inner = height - TOP - BOTTOM
    out = []
    for place, row in reversed([*enumerate(rows)]):  # the best is drawn last, above the others
        points = [(LEFT + i * step, TOP + inner * (1 - axis.heights[place])) for i, axis in enumerate(axes)]
        kind, fade = ("best", 1.0) if place == 0 else ("trial", 0.75 - 0.55 * place / max(1, len(rows) - 1))
        told = f"trial {row.slot}: {objective} {param_text(row.value)}"
        out.append(
            f'<path class="{kind}" opacity="{fade:.2f}" d="{_curve(points)}"><title>{escape(told)}</title></path>'
        )
        if place == 0:
            out += [f'<circle class="best" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in points]
    for i, axis in enumerate(axes):
        x = LEFT + i * step
        out.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{TOP + inner}"/>')
        name = escape(_brief(axis.name))
        out.append(f'<text class="axis-name" x="{x:.1f}" y="{TOP - 16}" text-anchor="middle">{name}</text>')
        anchor, shift = ("start", 8) if i else ("end", -8)
        for share, text in axis.ticks:
            y = TOP + inner * (1 - share)
            out.append(f'<line class="axis" x1="{x - 4:.1f}" x2="{x + 4:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
            out.append(
                f'<text class="value" x="{x + shift:.1f}" y="{y:.1f}" dy="0.32em" text-anchor="{anchor}">'
                f"{escape(text)}</text>"
            )
    best = f"best: trial {rows[0].slot}, {objective} {param_text(rows[0].value)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
        f' aria-label="{escape(title)}: {escape(best)}"><style>{style}{_STYLE}</style>'
        f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="12"/>'
        f'<text class="title" x="24" y="34">{escape(title)}</text>'
        f'<text class="name" x="{width - 24}" y="34" text-anchor="end">{escape(best)}</text>{"".join(out)}</svg>\n'
    )


def _key_axis(key: str, distribution: BaseDistribution, rows: Sequence[TrialRow]) -> Axis:
    values = [row.params[key] for row in rows]
    if isinstance(distribution, CategoricalDistribution):
        places = {choice: i for i, choice in enumerate(distribution.choices)}
        heights = {choice: (i + 0.5) / len(places) for choice, i in places.items()}
        return Axis(key, [heights[value] for value in values], [(heights[c], _choice_text(c)) for c in places])
    assert isinstance(distribution, (FloatDistribution, IntDistribution))
    bounds = (float(distribution.low), float(distribution.high))
    return _number_axis(key, [float(value) for value in values], log=distribution.log, bounds=bounds)


def _number_axis(name: str, values: Sequence[float], *, log: bool, bounds: tuple[float, ...] = ()) -> Axis:
    shown = [*values, *bounds]
    scale = Scale(Chart(name, [Line(name, "main", range(len(shown)), shown)], short, short, log=log))
    heights = [scale.position(value) or 0.0 for value in values]
    return Axis(name, heights, [(scale.position(tick) or 0.0, short(tick)) for tick in scale.ticks])


def _curve(points: Sequence[tuple[float, float]]) -> str:
    """Through the points, level at each axis, so that lines which cross at an axis can be told apart."""
    (x, y), *rest = points
    out = [f"M{x:.1f} {y:.1f}"]
    for right, down in rest:
        middle = (x + right) / 2
        out.append(f"C{middle:.1f} {y:.1f} {middle:.1f} {down:.1f} {right:.1f} {down:.1f}")
        x, y = right, down
    return "".join(out)


def _brief(name: str) -> str:
    """The last two parts of a long key."""
    return name if len(name) <= 24 else ".".join(name.split(".")[-2:])


def _choice_text(choice: Any) -> str:
    text = param_text(choice)
    return text if len(text) <= 24 else f"{text[:22]}…"
