"""What trained a run, and what was measured of it afterwards, as two tables of its page."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape

from modernbert_train.provenance import Start, energy, in_words
from modernbert_train.results import Result, table_rows
from modernbert_train.text import date, shorten, tokens_text, whole

MOST = 40  # lines of a table: the last ones
_LETTERS = 200  # of a command line


def start_table(starts: Sequence[Start], last_time: float) -> str:
    """A sentence, and a line for each start; empty for a run of a version that recorded none."""
    if not starts:
        return ""
    heads = ("Started", "Ended", "How", "From", "Program and machine", "Host", "Energy", "Command")
    lines = [
        (
            date(start.time),
            "" if start.ended is None else date(start.ended),
            f"{start.outcome or 'no end recorded'}{f': {start.error}' if start.error else ''}",
            f"{tokens_text(start.tokens)} tokens",
            start.program,
            start.host,
            _energy(start),
            shorten(shlex.join(start.command), _LETTERS),
        )
        for start in starts[-MOST:]
    ]
    more = f", the last {MOST} of {whole(len(starts))}" if len(starts) > MOST else ""
    text = f"<p>{escape(in_words(starts, last_time))}</p>"
    return f'<section class="box wide"><h2>What trained it{more}</h2>{text}{_table(heads, lines)}</section>'


def result_table(results: Sequence[Result]) -> str:
    """What `eval` and `finetune` measured of the run's checkpoints; empty where nothing was."""
    rows = table_rows(results)
    if not rows:
        return ""
    more = f", the last {MOST} of {whole(len(rows))}" if len(rows) > MOST else ""
    table = _table(("Checkpoint", "Measured", "Figure", "Value"), rows[-MOST:])
    return f'<section class="box wide"><h2>Measured afterwards{more}</h2>{table}</section>'


def _energy(start: Start) -> str:
    parts = ((start.gpu_joules, "GPUs"), (start.cpu_joules, "CPUs"))
    return ", ".join(f"{name} {energy(joules)}" for joules, name in parts if joules is not None) or "not known"


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
