"""Draw losses of runs as SVG, for a page.

python -m benchmarks.curves RUN... --out curves.svg

Of each run, the mean training loss of each fiftieth of its tokens, and every held-out loss.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from modernbert_train.core.files import write_whole
from modernbert_train.report.curves import Following

_COLOURS = [
    "#5b6472",
    "#115cc6",
    "#e75f1e",
    "#078965",
    "#be679a",
    "#724e00",
    "#009cd6",
    "#b5432e",
    "#444444",
    "#999900",
]
_PARTS = 50
Curve = Sequence[tuple[float, float]]


def draw_curves(curves: Mapping[str, Curve], caption: str) -> str:
    """Return curves of losses as SVG, the lowest last loss first.

    Args:
        curves: points of each by name, x from 0; points that are not finite are left out.
        caption: below the picture; it says what x is.
    """
    finite = {name: [point for point in curve if math.isfinite(point[1])] for name, curve in curves.items()}
    points = [point for curve in finite.values() for point in curve]
    if not points:
        return '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 10 10"/>\n'
    low, high = min(y for _, y in points), max(y for _, y in points)
    last, width, height = max(x for x, _ in points), 720, 380

    def level(y: float) -> float:
        return 20 + 320 * (high - y) / max(high - low, 1e-9)

    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
             'font-size="12"><rect width="100%" height="100%" fill="#fff"/>']  # fmt: skip
    for value in (low, (low + high) / 2, high):
        y = level(value)
        svg.append(f'<path d="M50 {y:.1f}H530" stroke="#eee"/><text x="44" y="{y + 4:.1f}" text-anchor="end" '
                     f'fill="#666">{value:.2f}</text>')  # fmt: skip
    for number, (name, curve) in enumerate(sorted(finite.items(), key=lambda each: curves[each[0]][-1][1])):
        colour = _COLOURS[number % len(_COLOURS)]
        line = " ".join(f"{50 + 480 * x / last:.1f},{level(y):.1f}" for x, y in curve)
        svg.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
                     f'<text x="545" y="{30 + 18 * number}" fill="{colour}">{escape(name)} '
                     f"{curves[name][-1][1]:.3f}</text>")  # fmt: skip
    svg.append(f'<text x="50" y="{height - 12}" fill="#333">{escape(caption)}</text></svg>')
    return "\n".join(svg) + "\n"


def losses_of_run(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Return the training loss and the held-out loss of a run, by millions of tokens."""
    following = Following(folder / "metrics.jsonl")
    following.refresh()
    history = following.history
    parts: dict[int, list[tuple[float, float]]] = {}
    for step in history.steps:
        part = math.ceil(_PARTS * step.tokens / history.steps[-1].tokens)
        parts.setdefault(part, []).append((step.tokens / 1e6, step.loss))
    means = [(of[-1][0], statistics.fmean(loss for _, loss in of)) for of in parts.values()]
    held_out = [(each.tokens / 1e6, each.loss) for each in history.validations]
    return {f"{folder.name}, training": means, f"{folder.name}, held out": held_out}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.svg")
    asked = parser.parse_args()
    curves = {name: curve for run in asked.runs for name, curve in losses_of_run(run).items() if curve}
    write_whole(asked.out, draw_curves(curves, "loss over millions of tokens"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
