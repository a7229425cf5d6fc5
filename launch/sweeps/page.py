"""A sweep -> results.html: one file, no request to anywhere, in the looks of a run's report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from launch.sweeps.picture import parallel_svg
from launch.sweeps.rows import TrialRow, param_text, ranked
from launch.sweeps.space import Space
from modernbert_train.report.chart import Chart, Line, Marks, standalone
from modernbert_train.report.frame import render_pictures
from modernbert_train.report.page import resource, write
from modernbert_train.text import fixed, plural, short, tokens_text

_MOST_POINTS = 1000  # of all curves together; a chart thins a longer line as if it were one curve
_STYLE = """
.box > svg { display: block; width: 100%; height: auto } .bar { fill: var(--main) }
td.reason { text-align: left; white-space: normal; color: var(--soft) } tr.best td { font-weight: 600 }
"""


def write_page(
    path: Path,
    space: Space,
    rows: Sequence[TrialRow],
    best: TrialRow | None,
    weights: Mapping[str, float],
    best_yaml: Path | None,
) -> Path:
    """Write the page, and beside it the first picture alone, as SVG.

    Args:
        path: of the page.
        space: the sweep.
        rows: its trials.
        best: the best of them.
        weights: importance by key; empty if it is not known.
        best_yaml: the best run's file, to be shown.

    Raises:
        StorageError: it cannot be written.
    """
    sweep = space.sweep
    complete = [row for row in ranked(rows, sweep.direction) if row.value is not None]
    done = f"{len(complete)} of {plural(space.trials, 'trial')} complete"
    parts = []
    if complete:
        title = f"{sweep.name}: {done}"
        picture = [parallel_svg(complete, space.distributions, sweep.objective, title, style)
                   for style in ("", resource("chart.css"))]  # fmt: skip
        parts.append(_box(picture[0]))
        write(path.with_suffix(".svg"), picture[1])
        if (curves := _curves(complete, sweep.objective)) is not None:
            parts.append(_box(curves))
    if weights:
        parts.append(_importance(weights))
    parts.append(_table(rows, space, best))
    if best_yaml is not None:
        text = escape(best_yaml.read_text("utf-8"))
        parts.append(f'<details class="box"><summary>The best run, {escape(str(best_yaml))}</summary><pre>{text}</pre>'
                     "</details>")  # fmt: skip
    note = f"{done}, {sweep.sampler} over {sweep.objective}"
    above = "".join([f"<style>{_STYLE}</style>", *parts])
    return write(path, render_pictures(f"{sweep.name}: sweep", sweep.name, note, above=above))


def _curves(complete: Sequence[TrialRow], objective: str) -> str | None:
    """The held-out figure over tokens, all trials in one line with gaps; None if it was only measured at the end."""
    kind, _, key = objective.partition(".")
    if kind != "validation":
        return None
    most = max(2, _MOST_POINTS // len(complete) - 1)
    curves = [_points(row, key, most) for row in complete]
    if all(len(curve) < 2 for curve in curves):
        return None
    joined = [point for curve in curves[1:] for point in (*curve, (curve[-1][0] if curve else 0.0, math.nan))]
    name = f"trial {complete[0].slot}, the best"
    lines = [
        Line("the other trials", "faint", [x for x, _ in joined], [y for _, y in joined]),
        Line(name, "main", [x for x, _ in curves[0]], [y for _, y in curves[0]]),
    ]
    end = max(x for curve in curves for x, _ in curve)
    log = key == "loss"
    chart = Chart(f"{objective}{' (log scale)' * log}", lines, fixed(3), short, log=log)
    return standalone(chart, Marks(end=end), f"{tokens_text(end)} tokens", "")


def _points(row: TrialRow, key: str, most: int) -> list[tuple[float, float]]:
    found = [
        (float(entry["tokens"]), float(entry[key]))
        for entry in row.entries
        if entry.get("kind") == "validation" and isinstance(entry.get(key), (int, float))
    ]
    return found[:: -(-len(found) // most)] if len(found) > most else found


def _importance(weights: Mapping[str, float]) -> str:
    bars = []
    for i, (key, share) in enumerate(weights.items()):
        y = 64 + 28 * i
        bars.append(f'<text x="250" y="{y}" dy="0.32em" text-anchor="end">{escape(key)}</text>'
                    f'<rect class="bar" x="262" y="{y - 8}" width="{max(1.0, 600 * share):.0f}" height="16" rx="3"/>'
                    f'<text x="{270 + 600 * share:.0f}" y="{y}" dy="0.32em">{share:.0%}</text>')  # fmt: skip
    height = 64 + 28 * len(weights)
    title = "Importance: what decides whether a trial is in the best quarter (PED-ANOVA)"
    return _box(f'<svg viewBox="0 0 1000 {height}" role="img" aria-label="{title}">'
                f'<text class="title" x="24" y="34">{title}</text>{"".join(bars)}</svg>')  # fmt: skip


def _table(rows: Sequence[TrialRow], space: Space, best: TrialRow | None) -> str:
    keys = list(space.distributions)
    head = "".join(
        f"<th>{escape(name)}</th>" for name in ["trial", space.sweep.objective, "state", "tokens", *keys, ""]
    )
    lines = []
    for row in ranked(rows, space.sweep.direction):
        cells = [str(row.slot), "" if row.value is None else param_text(row.value), row.state, tokens_text(row.tokens)]
        cells += [param_text(row.params.get(key, "")) for key in keys]
        mark = ' class="best"' if row is best else ""
        reason = f'<td class="reason">{escape(row.reason or "")}</td>'
        lines.append(f"<tr{mark}>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}{reason}</tr>")
    return f'<div class="box wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _box(content: str) -> str:
    return f'<div class="box">{content}</div>'
