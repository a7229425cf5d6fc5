"""How runs that share a chart are told apart: by colour, by dashes and by the shape of a marker.

Neighbours differ in dashes and colour both, so that neither colour vision nor a colour screen is needed: dashes and
markers alone tell 28 runs apart, with the colours 196. The colours (compare.css) were chosen so that any two of them
are far apart to every common kind of colour vision, on the light and on the dark page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

COLOURS = 7  # of compare.css
DASHES = 4  # of compare.css; the first is a whole line
SHAPES = (  # of markers, about 8 px wide around 0 0; the first runs need none
    "",
    "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0z",
    "M-3.2-3.2h6.4v6.4h-6.4z",
    "M0-4.2L4.2 3.4H-4.2z",
    "M0-4.6L4.6 0 0 4.6-4.6 0z",
    "M0 4.2L-4.2-3.4H4.2z",
    "M-1.3-4.2h2.6v2.9h2.9v2.6h-2.9v2.9h-2.6v-2.9h-2.9v-2.6h2.9z",
)
MARKERS = 3  # on each line
GOLDEN = 0.618034  # shifts the markers of each run against those of all before it


class Look(NamedTuple):
    """Numbers of the colour, the dashes and the marker's shape."""

    colour: int
    dash: int
    shape: int


def look(run: int) -> Look:
    """What the curves of a run are drawn with, by its number."""
    without_colour = DASHES * len(SHAPES)
    return Look((run + run // without_colour) % COLOURS, run % DASHES, run // DASHES % len(SHAPES))


def colour_of(run: int | None) -> str:
    """CSS classes of a run's colour; empty for a run alone."""
    return "" if run is None else f"run r{look(run).colour}"


def line_of(run: int | None) -> str:
    """CSS classes of a run's colour and dashes; empty for a run alone."""
    return "" if run is None else f"{colour_of(run)} d{look(run).dash}"


def belongs(run: int | None) -> str:
    """The attribute by which the script finds everything that is drawn of a run."""
    return "" if run is None else f' data-run="{run}"'


def markers(run: int | None, x: Sequence[int], y: Sequence[int | None]) -> list[tuple[int, int]]:
    """Which points of a line carry its marker: spread evenly, elsewhere for every run.

    Args:
        run: its number, or None.
        x, y: the points; y is None in a gap.
    """
    drawn = [(at, height) for at, height in zip(x, y, strict=True) if height is not None]
    if run is None or not look(run).shape or not drawn:
        return []
    left, width, shift = drawn[0][0], drawn[-1][0] - drawn[0][0], run * GOLDEN % 1
    wanted = [left + width * (i + shift) / MARKERS for i in range(MARKERS)]
    return sorted({min(drawn, key=lambda point: abs(point[0] - place)) for place in wanted})


def marker(run: int, x: str, y: str) -> str:
    """The marker of a run at a place of an SVG; the page holds the shapes once."""
    return f'<use class="mark {colour_of(run)}"{belongs(run)} href="#shape{look(run).shape}" x="{x}" y="{y}"/>'


def shapes() -> str:
    """The shapes, to be put into a page once."""
    paths = "".join(f'<path class="shape" id="shape{i}" d="{d}"/>' for i, d in enumerate(SHAPES) if d)
    return f'<svg class="shapes" width="0" height="0" aria-hidden="true"><defs>{paths}</defs></svg>'


def key(run: int, name: str) -> str:
    """A run's name behind a sample of its line."""
    mark = marker(run, "17", "0").replace(belongs(run), "") if look(run).shape else ""
    line = f'<path class="main {line_of(run)}" d="M0 0H34"/>'
    return (
        f'<span class="key"><svg viewBox="0 -6 34 12" aria-hidden="true">{line}{mark}</svg>'
        f'<span title="{escape(name)}">{escape(name)}</span></span>'
    )
