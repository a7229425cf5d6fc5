"""Still pictures as SVG text, drawn so that one drawing fits every width: a plan, a sweep, figures of the docs.

The curves of runs are drawn in the browser, see page.js.

Curves live in a 10000 x 10000 square that stretches with the page (strokes do not); labels are placed in percent and
keep their size. The same drawing therefore serves a phone, a wide page and the standalone picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal, NamedTuple

from modernbert_train.report.ticks import log_ticks, round_step
from modernbert_train.text import shorten, tokens_text

UNITS = 10_000  # side of the square that curves are drawn in
LABEL_ROW = 15  # height of one row of phase labels above the plot, in px
POINTS = 20_000  # drawn in one chart, all its lines together, up to gaps: bounds the page's size
BUCKETS = 600  # that a line is thinned to at most, of two points each
EVENTS = 500  # restarts or faults drawn in one chart; where there are more, neighbours share a mark
PHASE_LETTERS = 24  # of a phase's name above the plot
SERIES = 4  # main lines of one run in a chart that differ, see chart.css
DIAMOND = "M0 0l5 6-5 6-5-6z"
NARROW = 300  # plot width on a phone in px: phase labels must not touch even there


@dataclass(frozen=True)
class Line:
    """One series. `kind` is also its CSS class: faint and main are curves, dashed a reference, points are dots.

    `series` is its number among several main lines.
    """

    name: str
    kind: Literal["faint", "main", "dashed", "points"]
    x: Sequence[float]
    y: Sequence[float]
    series: int = 0

    @property
    def css(self) -> str:
        series = self.series % SERIES
        return f"{self.kind} s{series}" if series else self.kind


@dataclass(frozen=True)
class Chart:
    """What one picture shows. `low` and `high` are values the vertical axis must include."""

    title: str
    lines: Sequence[Line]
    text: Callable[[float], str]  # a value, exactly enough to quote
    tick: Callable[[float], str]  # a value on the axis, short
    log: bool = False
    low: float | None = None
    high: float | None = None


class Event(NamedTuple):
    """A restart or a fault of a run."""

    tokens: float
    label: str


@dataclass(frozen=True)
class Marks:
    """What charts share: the end of the x axis in tokens, phase boundaries, restarts, faults, losses not numbers.

    `ticks` are places and labels of an axis that is not of tokens.
    """

    end: float
    ticks: Sequence[tuple[float, str]] = ()
    boundaries: Sequence[tuple[float, str]] = ()
    restarts: Sequence[Event] = ()
    faults: Sequence[Event] = ()
    broken: Sequence[float] = ()


class Points(NamedTuple):
    """A line as drawn: positions in UNITS from the top left; y is None in a gap."""

    x: list[int]
    y: list[int | None]
    text: list[str]


class Drawing(NamedTuple):
    """A chart as drawn: SVG elements of its axes, those that lie over them, and the points of each line."""

    axes: str
    curves: str
    points: list[Points]


class Scale:
    """The vertical axis: values to 0 (bottom) ... 1 (top), and round ticks."""

    def __init__(self, chart: Chart) -> None:
        values = [v for line in chart.lines for v in line.y if math.isfinite(v) and (v > 0 or not chart.log)]
        values += [v for v in (chart.low, chart.high) if v is not None and values]
        self.empty = not values
        self.log = chart.log
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        if self.log:
            low, high = math.log10(low) if values else 0.0, math.log10(high) if values else 1.0
        if high - low < 1e-9 * max(abs(high), 1e-30):
            margin = 0.2 if self.log else 0.1 * abs(high) or 1.0  # a constant: draw it in the middle
            low, high = low - margin, high + margin
        if self.log:
            self.low, self.high = low - 0.04 * (high - low), high + 0.04 * (high - low)
            self.ticks = log_ticks(self.low, self.high)
        else:
            step, margin = round_step((high - low) / 4), 0.05 * (high - low)
            self.low = low if low == chart.low else low - margin
            self.high = high if high == chart.high else high + margin
            first = math.ceil(self.low / step - 1e-9)
            self.ticks = [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def position(self, value: float) -> float | None:
        """Share of the height; None where nothing can be drawn."""
        if not math.isfinite(value) or (self.log and value <= 0):
            return None
        return ((math.log10(value) if self.log else value) - self.low) / (self.high - self.low)


def place(line: Line, scale: Scale, chart: Chart, end: float) -> Points:
    """Thin a line to its share of the chart's POINTS, and turn it into positions and texts."""
    chosen = thin(line.x, line.y, min(BUCKETS, POINTS // (2 * len(chart.lines)))) if line.x else []
    x = [round(line.x[i] / end * UNITS) if end else 0 for i in chosen]
    heights = [scale.position(line.y[i]) for i in chosen]
    y = [None if h is None else round((1 - h) * UNITS) for h in heights]
    return Points(x, y, [chart.text(line.y[i]) if math.isfinite(line.y[i]) else "not a number" for i in chosen])


def thin(x: Sequence[float], y: Sequence[float], buckets: int = 600) -> list[int]:
    """Choose the points to draw: in each of `buckets` equal ranges of x the lowest, the highest and one gap.

    Args:
        x: rising positions.
        y: values; not finite is a gap.

    Returns:
        Rising indices, the first and last always among them; all of them if there are at most 2 * buckets.
    """
    if len(x) <= 2 * buckets:
        return list(range(len(x)))
    span = (x[-1] - x[0]) or 1.0
    members: dict[int, list[int]] = {}
    for i, position in enumerate(x):
        members.setdefault(min(int((position - x[0]) / span * buckets), buckets - 1), []).append(i)
    chosen = {0, len(x) - 1}
    for indices in members.values():
        finite = [i for i in indices if math.isfinite(y[i])]
        if finite:
            chosen |= {min(finite, key=y.__getitem__), max(finite, key=y.__getitem__)}
        if len(finite) < len(indices):
            chosen.add(next(i for i in indices if not math.isfinite(y[i])))
    return sorted(chosen)


def label_rows(marks: Marks, width: float = NARROW) -> list[int]:
    """Give each phase label a row above the plot so that no two touch at `width` px; row 0 is the lowest."""
    ends: list[list[tuple[float, float]]] = []
    rows = []
    for start, name in marks.boundaries:
        left, right = _label_span(start / marks.end if marks.end else 0.0, shorten(name, PHASE_LETTERS), width)
        row = next((r for r, taken in enumerate(ends) if all(right < a or b < left for a, b in taken)), len(ends))
        if row == len(ends):
            ends.append([])
        ends[row].append((left - 8, right + 8))
        rows.append(row)
    return rows


def draw(chart: Chart, marks: Marks, width: float = NARROW) -> Drawing:
    """Draw one chart in the coordinates of its plot area; labels hang out of it on all sides.

    Args:
        width: narrowest width the plot may be shown at, in px.

    Returns:
        SVG elements to put in an <svg> with visible overflow, and the points of each line for the hover script.
        An empty chart is a sentence without points.
    """
    scale = Scale(chart)
    if scale.empty:
        sentence = '<text class="tick" x="50%" y="50%" text-anchor="middle">Nothing recorded yet</text>'
        return Drawing(sentence, "", [])
    out = ['<rect class="plot" width="100%" height="100%"/>']
    for value in scale.ticks:
        y = f"{100 * (1 - (scale.position(value) or 0.0)):.2f}%"
        out.append(f'<line class="grid" x2="100%" y1="{y}" y2="{y}"/>')
        out.append(
            f'<text class="tick" x="-8" y="{y}" dy="0.32em" text-anchor="end">{escape(chart.tick(value))}</text>'
        )
    out += _x_axis(marks)
    out += _boundaries(marks, width)
    axes, out = "".join(out), []
    placed = [place(line, scale, chart, marks.end) for line in chart.lines]
    curves = [_curve(line, points) for line, points in zip(chart.lines, placed, strict=True)]
    out.append(f'<svg viewBox="0 0 {UNITS} {UNITS}" preserveAspectRatio="none" width="100%" height="100%"'
               f' overflow="visible">{"".join(curves)}</svg>')  # fmt: skip
    for x, label in _grouped(marks.restarts, marks.end):
        out.append(
            f'<g class="restart"><title>{escape(label)}</title>'
            f'<line x1="{x}" x2="{x}" y1="100%" y2="93%"/><circle cx="{x}" cy="93%" r="3"/></g>'
        )
    for x, label in _grouped(marks.faults, marks.end):
        out.append(
            f'<g class="fault"><title>{escape(label)}</title>'
            f'<svg x="{x}" overflow="visible"><path d="{DIAMOND}"/></svg></g>'
        )
    for x in sorted({f"{_percent(position, marks.end):.1f}%" for position in marks.broken}):
        out.append(f'<line class="broken" x1="{x}" x2="{x}" y2="5%"><title>loss not a number</title></line>')
    return Drawing(axes, "".join(out), placed)


def standalone(chart: Chart, marks: Marks, subtitle: str, style: str, width: int = 1000, height: int = 440) -> str:
    """One chart as a whole SVG file on a white card, readable on light and dark pages.

    Args:
        style: CSS of the charts, with its own values for every variable.
        width, height: size in px.
    """
    rows = max(label_rows(marks, width - 88), default=0)
    top = 92 + LABEL_ROW * rows
    plot_width, plot_height = width - 88, height - top - 48
    drawing = draw(chart, marks, plot_width)
    legend, x = [], 64
    for kind, name in legend_entries(chart, marks):
        legend.append(f'<g transform="translate({x} 58)">{key_mark(kind)}<text class="name" x="28" y="4">{escape(name)}'
                      "</text></g>")  # fmt: skip
        x += 28 + int(6.6 * len(name)) + 22
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' role="img" aria-label="{escape(chart.title)}, {escape(subtitle)}"><style>{style}</style>'
        f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="12"/>'
        f'<text class="title" x="64" y="34">{escape(chart.title)}</text>'
        f'<text class="name" x="{width - 24}" y="34" text-anchor="end">{escape(subtitle)}</text>{"".join(legend)}'
        f'<svg x="64" y="{top}" width="{plot_width}" height="{plot_height}" overflow="visible">'
        f"{drawing.axes}{drawing.curves}</svg>"
        f'<text class="tick" x="{width - 24}" y="{height - 10}" text-anchor="end">tokens seen</text></svg>\n'
    )


def legend_entries(chart: Chart, marks: Marks) -> list[tuple[str, str]]:
    """(CSS class, name) of everything the chart shows that needs a name."""
    entries: list[tuple[str, str]] = [(line.css, line.name) for line in chart.lines if line.x]
    return entries + [("restart", "restart")] * bool(marks.restarts) + [("fault", "fault")] * bool(marks.faults)


def key_mark(css: str) -> str:
    """The little picture of a series in a legend, 22 px wide, centred on y = 0."""
    if css == "restart":
        return '<g class="restart"><line x1="11" x2="11" y1="-3" y2="6"/><circle cx="11" cy="-3" r="3"/></g>'
    if css == "fault":
        return f'<g class="fault"><path transform="translate(11 -6)" d="{DIAMOND}"/></g>'
    return f'<path class="{css}" d="{"M11 0h0" if css.startswith("points") else "M0 0H22"}"/>'


def _x_axis(marks: Marks) -> list[str]:
    out = ['<line class="axis" x2="100%" y1="100%" y2="100%"/>']
    step = round_step(marks.end / 5) if marks.end else 1.0
    places = [i * step for i in range(int(marks.end / step + 1e-9) + 1)]
    for place, label in marks.ticks or [(place, tokens_text(place)) for place in places]:
        x = _percent(place, marks.end)
        anchor = "end" if x > 95 and not marks.ticks else "middle"
        label = escape(label)
        out.append(f'<line class="axis" x1="{x}%" x2="{x}%" y1="100%" y2="100%" transform="translate(0 4)"/>')
        out.append(f'<text class="tick" x="{x}%" y="100%" dy="18" text-anchor="{anchor}">{label}</text>')
    return out


def _grouped(events: Sequence[Event], end: float) -> list[tuple[str, str]]:
    """(place, label) of marks: events that would cover each other are one, and at most EVENTS or so."""
    for places in (1000, 200, 50, 20, 10, 4):
        labels: dict[float, list[str]] = {}
        for event in events:
            share = round(event.tokens / end * places) / places if end else 0.0
            labels.setdefault(share, []).append(event.label)
        if len(labels) <= EVENTS:
            break
    return [
        (f"{100 * share:.1f}%", "; ".join(found[:3]) + (f"; and {len(found) - 3:,} more" if found[3:] else ""))
        for share, found in labels.items()
    ]


def _boundaries(marks: Marks, width: float) -> list[str]:
    out = []
    for (start, name), row in zip(marks.boundaries, label_rows(marks, width), strict=True):
        x, up = _percent(start, marks.end), 8 + LABEL_ROW * row
        shown = shorten(name, PHASE_LETTERS)
        flip = _flips(x / 100, shown, width)
        text = escape(f"{shown} ▸" if flip else shown) + (f"<title>{escape(name)}</title>" if shown != name else "")
        if start > 0:
            out.append(f'<line class="border" x1="{x}%" x2="{x}%" y1="{-up - 10}" y2="100%"/>')
        out.append(f'<text class="phase" x="{x}%" dx="{-5 if flip else 5 * (start > 0)}" y="{-up}"'
                   f' text-anchor="{"end" if flip else "start"}">{text}</text>')  # fmt: skip
    return out


def _flips(share: float, name: str, width: float) -> bool:
    """Whether a label must stand left of its border to stay inside the plot."""
    return share * width + 7 * len(name) > width


def _label_span(share: float, name: str, width: float) -> tuple[float, float]:
    start, length = share * width, 7.0 * (len(name) + 2)
    return (start - length, start) if _flips(share, name, width) else (start, start + length)


def _curve(line: Line, points: Points) -> str:
    """A line as a path, and its points that have no neighbour to be joined with as dots.

    Dots are strokes of length zero: round caps make them circles whatever the stretch.
    """
    curve: list[str] = []
    dots: list[str] = []
    pen_down = False
    for i, (x, y) in enumerate(zip(points.x, points.y, strict=True)):
        if y is None:
            pen_down = False
        elif line.kind == "points" or (not pen_down and (i + 1 == len(points.y) or points.y[i + 1] is None)):
            dots.append(f"M{x} {y}h0")
        else:
            curve.append(f"{'L' if pen_down else 'M'}{x} {y}")
            pen_down = True
    lone = "" if line.kind == "points" else " lone"
    found = ((line.css, curve), (line.css + lone, dots))
    return "".join(f'<path class="{css}" d="{"".join(d)}"/>' for css, d in found if d)


def _percent(position: float, end: float) -> float:
    return round(100 * position / end, 3) if end else 0.0
