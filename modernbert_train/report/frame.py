"""Pages of still pictures: the table of many fine-tunings, a sweep. One file without a script and without a request."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from modernbert_train.report.chart import LABEL_ROW, Chart, Marks, draw, key_mark, label_rows, legend_entries
from modernbert_train.report.page import resource

_NO_REQUESTS = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def render_pictures(
    title: str, heading: str, note: str, *, above: str = "", charts: Sequence[Chart] = (), marks: Marks | None = None
) -> str:
    """Build a page.

    Args:
        title: of the browser's tab; not HTML, as heading and note.
        heading, note: the first line.
        above: HTML before the charts.
        charts, marks: what is drawn.
    """
    style = "".join(resource(name) for name in ("chart.css", "frame.css"))
    figures = "".join(_figure(chart, marks or Marks(end=1.0)) for chart in charts)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_NO_REQUESTS}"><link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{style}</style></head>
<body><main>
<header><h1>{escape(heading)}</h1><p>{escape(note)}</p></header>
{above}
<div class="charts">{figures}</div>
</main></body></html>
"""


def _figure(chart: Chart, marks: Marks) -> str:
    axes, curves, points = draw(chart, marks)
    keys = [
        f'<span><svg viewBox="0 -5 22 10" aria-hidden="true">{key_mark(css)}</svg>{escape(name)}</span>'
        for css, name in (legend_entries(chart, marks) if points else ())
    ]
    top = 14 + LABEL_ROW * (1 + max(label_rows(marks), default=-1))
    title = escape(chart.title)
    return f"""<figure class="box"><figcaption><h2>{title}</h2><div class="keys">{"".join(keys)}</div></figcaption>
<div class="frame" style="padding-top:{top}px"><svg role="img" aria-label="{title}">{axes}{curves}</svg></div></figure>
"""
