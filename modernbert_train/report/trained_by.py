"""Two tables of a run's page: what trained it, and what was measured of it afterwards."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from modernbert_train.checkpoints.provenance import Start, in_words
from modernbert_train.checkpoints.results import Result, table_rows
from modernbert_train.core.text import date, shorten, tokens_text, whole
from modernbert_train.report.table import Table

MOST = 40  # lines of a table: the last ones
_LETTERS = 200  # of a command line


def start_table(starts: Sequence[Start], last_time: float) -> Table | None:
    """A sentence, and a line for each start; none for a run of a version that recorded none."""
    if not starts:
        return None
    heads = ("Started", "Ended", "How", "From", "Program and machine", "Host", "Command")
    lines = [
        (
            date(start.time),
            "" if start.ended is None else date(start.ended),
            f"{start.outcome or 'no end recorded'}{f': {start.error}' if start.error else ''}",
            f"{tokens_text(start.tokens)} tokens",
            start.program,
            start.host,
            shorten(shlex.join(start.command), _LETTERS),
        )
        for start in starts[-MOST:]
    ]
    more = f", the last {MOST} of {whole(len(starts))}" if len(starts) > MOST else ""
    return Table(f"What trained it{more}", heads, lines, in_words(starts, last_time))


def result_table(results: Sequence[Result]) -> Table | None:
    """What `eval` and `finetune` measured of the run's checkpoints; none where nothing was."""
    rows = table_rows(results)
    if not rows:
        return None
    more = f", the last {MOST} of {whole(len(rows))}" if len(rows) > MOST else ""
    return Table(f"Measured afterwards{more}", ("Checkpoint", "Measured", "Figure", "Value"), rows[-MOST:])
