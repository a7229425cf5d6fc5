"""The runs of a comparison as a table, which is also the legend of its charts, and what differs between them.

The table stands in the page whole; compare.js makes it sort, filter, hide runs and highlight them. Keys in which the
configurations differ run along the longer side: a few runs have a table of their own with a line per key, many runs
have a column per key in the one table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from modernbert_train.report.curves import History
from modernbert_train.report.series import key
from modernbert_train.report.summary import NONE, figures
from modernbert_train.text import shorten

FEW = 6  # runs whose settings stand side by side
LETTERS = 48  # of a value; the whole is its title
TITLE_LETTERS = 2000
ABSENT = "absent"
_OWN = ("name", "runs_folder")  # differ between any two runs and say nothing


@dataclass(frozen=True)
class Run:
    """One of the runs.

    Attributes:
        name: that tells it from the others.
        history: what it did.
        settings: its configuration as text, by dotted key; empty if there is none.
    """

    name: str
    history: History
    settings: Mapping[str, str]


def runs_table(runs: Sequence[Run]) -> str:
    """A row per run: its line in the charts, its name, what it came to; the settings that differ if runs are many."""
    found = [figures(run.history) for run in runs]
    heads = [
        head
        for head in dict.fromkeys(head for each in found for head in each)
        if head not in ("MFU", "Data wait") or any(math.isfinite(each[head].value) for each in found)
    ]
    losses = [each["Validation loss"].value for each in found]
    best = min(filter(math.isfinite, losses), default=None)
    settings = differing(runs) if len(runs) > FEW else {}
    rows = []
    for number, (run, each) in enumerate(zip(runs, found, strict=True)):
        cells = []
        for head in heads:
            value, text = each.get(head, NONE)
            shown = f"<b>{escape(text)}</b>" if head == "Validation loss" and value == best else escape(text)
            cells.append(f'<td data-value="{value if math.isfinite(value) else ""}">{shown}</td>')
        cells += [_value(values[number]) for values in settings.values()]
        rows.append(f'<tr data-run="{number}"><th scope="row">{key(number, run.name)}</th>{"".join(cells)}</tr>')
    columns = [f"<th>{escape(head)}</th>" for head in ("Run", *heads)]
    columns += [f'<th class="key-name">{_breakable(name)}</th>' for name in settings]
    return f"""<details class="box runs" open><summary>Runs</summary>
<div class="tools" hidden><input type="search" aria-label="Filter the runs" placeholder="Filter by name or key=value">
<button type="button" data-all="show">Show all</button><button type="button" data-all="hide">Hide all</button>
<output></output></div>
<div class="wide"><table id="runs"><thead><tr>{"".join(columns)}</tr></thead>
<tbody>{"".join(rows)}</tbody></table></div></details>"""


def settings_table(runs: Sequence[Run]) -> str:
    """What differs in the configurations of a few runs, a line per key; of many runs only what the table cannot say."""
    settings = differing(runs)
    notes = [] if settings else ["Their configurations are the same."]
    if unknown := [run.name for run in runs if not run.settings]:
        more = f" and {len(unknown) - 10} more" if unknown[10:] else ""
        notes = [f"Without a config.yaml that can be read: {', '.join(unknown[:10])}{more}."]
    note = "".join(f'<p class="note">{escape(each)}</p>' for each in notes)
    if not settings or len(runs) > FEW:
        return note
    head = "".join(f"<th>{key(number, run.name)}</th>" for number, run in enumerate(runs))
    lines = [
        f'<tr><th scope="row" class="key-name">{_breakable(name)}</th>{"".join(map(_value, values))}</tr>'
        for name, values in settings.items()
    ]
    return f"""{note}<section class="box"><h2>What differs in their configurations</h2>
<div class="wide"><table id="settings"><thead><tr><th>Key</th>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>
</div></section>"""


def differing(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Key -> its value in each run, for the keys that are not the same in all of them."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in _OWN)
    values = {key: [run.settings.get(key, ABSENT) for run in runs] for key in keys}
    return {key: found for key, found in values.items() if len(set(found)) > 1}


def _value(text: str) -> str:
    shown = shorten(text, LETTERS)
    title = f' title="{escape(shorten(text, TITLE_LETTERS))}"' if shown != text else ""
    return f"<td{title}>{escape(shown)}</td>"


def _breakable(name: str) -> str:
    """A dotted key that may be broken behind its dots and underscores."""
    return escape(name).replace(".", ".<wbr>").replace("_", "_<wbr>")
