"""The trials of a sweep, one row each, regardless of the number of attempts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from launch.sweeps.space import trial_name
from launch.sweeps.trial import Entry, read_entries, tokens_seen
from launch.sweeps.trial_store import CODE, REASON, Store, over, slots


@dataclass(frozen=True)
class TrialRow:
    """One trial, for the table and the page."""

    slot: int
    state: str  # complete, pruned, refused, diverged, undefined, failed, running or waiting
    value: float | None  # of complete trials
    tokens: int
    params: Mapping[str, Any]
    reason: str | None
    entries: Sequence[Entry]  # of metrics.jsonl
    code: int | None = None  # exit code of a failed one


def make_rows(store: Store, folder: Path) -> list[TrialRow]:
    """Return every trial that has been started, by number."""
    return [_row(slot, attempts, folder / trial_name(slot)) for slot, attempts in slots(store.attempts()).items()]


def best_row(rows: Sequence[TrialRow], direction: str) -> TrialRow | None:
    """Return the completed trial with the best figure, the first of equals."""
    return next((row for row in ranked(rows, direction) if row.value is not None), None)


def ranked(rows: Sequence[TrialRow], direction: str) -> list[TrialRow]:
    """Return completed trials by figure, then the others by number."""
    sign = 1 if direction == "minimize" else -1
    return sorted(rows, key=lambda row: (row.value is None, sign * (row.value or 0.0), row.slot))


def param_text(value: Any) -> str:
    """Format a value as a cell of a table."""
    return f"{value:.4g}" if isinstance(value, float) else "null" if value is None else str(value)


def _row(slot: int, attempts: Sequence[FrozenTrial], folder: Path) -> TrialRow:
    last = next((attempt for attempt in attempts if over(attempt)), attempts[-1])
    reason = last.user_attrs.get(REASON)
    outcome = str(reason or "").split(":")[0].split(" ")[0]
    state = {
        TrialState.COMPLETE: "complete",
        TrialState.PRUNED: outcome,
        TrialState.FAIL: "failed" if reason else "waiting",
        TrialState.RUNNING: "running",
        TrialState.WAITING: "waiting",
    }[last.state]
    entries = read_entries(folder)
    value = last.value if last.state == TrialState.COMPLETE else None
    return TrialRow(slot, state, value, tokens_seen(entries), last.params, reason, entries, last.user_attrs.get(CODE))
