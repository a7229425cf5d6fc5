"""Faults and restarts of a run, in words, as a short table."""

from __future__ import annotations

import math

from modernbert_train.core.text import date, fixed, tokens_text, whole
from modernbert_train.report.curves import Fault, History, Restart
from modernbert_train.report.table import Table

MOST = 40  # lines of the table: the last ones

_FAULTS = {"non_finite": "loss or gradient not finite", "spike": "the loss jumped"}
_ACTIONS = {"ignore": "let pass", "skip": "update left out", "stop": "run stopped"}


def what_happened(event: Fault | Restart) -> str:
    return "restart" if isinstance(event, Restart) else _FAULTS.get(event.fault, event.fault)


def what_was_done(event: Fault | Restart) -> str:
    if isinstance(event, Restart):
        return f"from {event.checkpoint or 'scratch'}"
    return f"back to {event.checkpoint}" if event.checkpoint else _ACTIONS.get(event.action, event.action)


def event_table(history: History) -> Table | None:
    """Faults and restarts in the order in which they came; none for a run that simply ran through."""
    found: list[Fault | Restart] = [*history.restarts, *history.faults]
    found.sort(key=lambda event: event.time if math.isfinite(event.time) else 0.0)
    if not found:
        return None
    title = "Faults and restarts"
    if len(found) > MOST:
        title += f", the last {MOST} of {whole(len(found))}"
    heads = ("When", "Step", "Tokens", "What", "Loss", "What was done")
    return Table(title, heads, [_cells(event) for event in found[-MOST:]])


def _cells(event: Fault | Restart) -> tuple[str, ...]:
    loss = fixed(3)(event.loss) if isinstance(event, Fault) else ""
    when, where = date(event.time), (whole(event.step), tokens_text(event.tokens, 4))
    return (when, *where, what_happened(event), loss, what_was_done(event))
