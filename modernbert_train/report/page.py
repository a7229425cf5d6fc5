"""Render the page of runs as one file: uPlot, a script, a style sheet and the document of the runs.

The file sends no requests; a served page requests data from its server only. Names and texts of runs reach the script
as JSON and become text nodes, never HTML.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from modernbert_train.core.files import write_out
from modernbert_train.report.document import read_runs
from modernbert_train.report.summary import Newest

NO_REQUESTS = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
ONLY_OURS = f"{NO_REQUESTS}; connect-src 'self'"


def write_report(run_folder: Path, out: Path | None = None, newest: Newest | None = None) -> Path:
    """Draw a run from the records and the configuration in its folder.

    The page depends on them alone (no clock, no properties of this machine), so the same run gives the same bytes.

    Args:
        run_folder: of the run.
        out: the page; None is <run_folder>/report.html.
        newest: finds the newest valid checkpoint; None names the last one of the record.

    Returns:
        The page's path. An older page is replaced atomically.

    Raises:
        DataError: the folder lacks metrics.jsonl.
        StorageError: the page cannot be written.
    """
    return write_comparison([run_folder], out or run_folder / "report.html", newest)


def write_comparison(folders: Sequence[Path], out: Path, newest: Newest | None = None) -> Path:
    """Draw several runs into one page; see `write_report`.

    Args:
        folders: of the runs.
        out: the page; an older one is replaced atomically.
        newest: see `write_report`.

    Returns:
        `out`.
    """
    return write_out(out, render(read_runs(folders, newest)))


def render(document: Mapping[str, Any]) -> str:
    """Build the page of a document."""
    data = json.dumps(document, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    style = "".join(resource(name) for name in ("vendor/uplot.css", "page.css"))
    script = "".join(resource(name) for name in ("vendor/uplot.js", "page.js"))
    policy = ONLY_OURS if document["live"] else NO_REQUESTS
    title = escape(document["title"])
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}"><link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style></head>
<body><main><noscript><p class="box note warn">The curves are drawn by a script, which this browser does not run.</p>
{_plain_table(document)}</noscript></main>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body></html>
"""


def _plain_table(document: Mapping[str, Any]) -> str:
    """Return the figures of each run, for a reader without JavaScript."""
    heads = list(dict.fromkeys(head for run in document["runs"] for head in run["figures"]))
    lines = []
    for run in document["runs"]:
        cells = [run["name"], *(run["figures"].get(head, ("", ""))[1] for head in heads)]
        lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{escape(cell)}</th>" for cell in ("Run", *heads))
    return f'<div class="box wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def resource(name: str) -> str:
    return files("modernbert_train.report").joinpath(name).read_text("utf-8")
