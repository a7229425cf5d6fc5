"""The numbers of a run: tiles for the whole, a table by phase, and what a reader must not overlook."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from modernbert_train.core.text import duration, fixed, percent, plural, rate, tokens_text, whole
from modernbert_train.report.curves import History, ValidationRecord
from modernbert_train.report.effective import FORMULA, Spent, spent_of
from modernbert_train.report.evaluations import NUMBER, last_figures
from modernbert_train.report.progress import ending
from modernbert_train.report.table import Table
from modernbert_train.report.training_loss import LOSS_STEPS, training_loss

Newest = Callable[[Path], tuple[str, str]]  # of a run's folder: which checkpoint is the newest valid one, and a note
LOSS, ACCURACY = fixed(3), percent(2)
MOST_PHASES = 100  # lines of the table


def spent_in(history: History, starts: Sequence[Mapping[str, Any]]) -> Spent:
    """What the time of a run went into, as far as its record is read."""
    seconds = _finite(history.steps.column("own_seconds"))
    return spent_of(
        steps=float(seconds[seconds > 0].sum()),
        saved=history.saved,
        first=history.earliest,
        last=history.latest,
        starts=starts,
    )


def tiles(
    history: History, spent: Spent | None = None, newest: tuple[str, str] | None = None
) -> list[tuple[str, str, str]]:
    """The whole run as named numbers: what, how much, and what to say of it.

    Args:
        history: the record.
        spent: what its time went into.
        newest: which checkpoint is the newest valid one, and what to say of it; None where nobody has looked.
    """
    steps, last = history.steps, history.validations[-1] if history.validations else None
    pause = history.last_time - history.first_time - history.running_seconds
    facts = [
        ("Tokens", tokens_text(steps[-1].tokens) if steps else "0", whole(steps[-1].tokens) if steps else ""),
        ("Steps", whole(steps[-1].step) if steps else "0", f"{plural(history.repeated_steps, 'step')} repeated"),
        (
            "Training loss",
            _shown(_final(steps.column("loss")), LOSS),
            f"mean of last {plural(min(len(steps), LOSS_STEPS), 'step')}",
        ),
        ("Validation loss", LOSS(last.loss) if last else "none", _validated(last)),
        ("Unigram baseline", LOSS(last.unigram_loss) if last else "none", "loss of guessing"),
        ("Accuracy", ACCURACY(last.accuracy) if last else "none", _accuracy_to_beat(last)),
        ("Tokens per second", _shown(_median(steps.column("tokens_per_second")), whole), "median over steps"),
        ("Packing efficiency", _shown(_median(steps.column("packing_efficiency")), percent(2)), "median over steps"),
        ("Wall time", duration(history.running_seconds), f"and {duration(pause)} paused" if pause >= 1 else "no pause"),
        ("Restarts", whole(len(history.restarts)), _last_restart(history)),
    ]
    if spent is not None:
        blocked, most = sum(spent.blocked), max(spent.blocked, default=0.0)
        facts += [
            ("Effective training time", _shown(spent.effective, percent(1)), FORMULA),
            ("Blocked by checkpoints", f"{blocked:.3g} s", f"by {len(spent.blocked)}, at most {most:.2g} s by one"),
            ("Last checkpoint", "none" if spent.last_saved is None else f"step {spent.last_saved:,}", "in the record")
            if newest is None
            else ("Newest valid checkpoint", *newest),
            ("Restart time", spent.restart_text, "median, from a process's last line to the next step"),
        ]
    return facts


def progress_tiles(history: History, total_tokens: float) -> list[tuple[str, str, str]]:
    """How far a run that trains has come, and the time that is left; nothing before its first step."""
    if not history.steps or not total_tokens:
        return []
    last = history.steps[-1]
    done = min(1.0, last.tokens / total_tokens)
    found = [("Progress", percent(1)(done), f"{tokens_text(last.tokens)} of {tokens_text(total_tokens)} tokens")]
    if math.isfinite(last.seconds_left):
        end = f"ends {ending(last.seconds_left, datetime.fromtimestamp(history.last_time))}"
        found.append(("Time left", duration(last.seconds_left), end))
    return found


class Figure(NamedTuple):
    """One number of a run: as it is sorted by (not a number where there is none), and as it is shown."""

    value: float
    text: str


NONE = Figure(math.nan, "none")


def figures(history: History) -> dict[str, Figure]:
    """What a run came to, by the heads of a table's columns."""
    steps, last = history.steps, history.validations[-1] if history.validations else None
    tokens, number = (steps[-1].tokens, steps[-1].step) if steps else (0, 0)

    def shown(value: float, text: Callable[[float], str]) -> Figure:
        return Figure(value, _shown(value, text))

    return {
        "Training loss": shown(_final(steps.column("loss")), LOSS),
        "Validation loss": Figure(last.loss, LOSS(last.loss)) if last else NONE,
        "Accuracy": Figure(last.accuracy, ACCURACY(last.accuracy)) if last else NONE,
        "Tokens": shown(tokens, tokens_text),
        "Steps": shown(number, whole),
        "Tokens/s": shown(_median(steps.column("tokens_per_second")), whole),
        "MFU": shown(_median(steps.column("mfu")), percent(1)),
        "Data wait": shown(_median(steps.column("data_wait_share")), percent(1)),
        "Wall time": shown(history.running_seconds, duration),
        "Restarts": shown(len(history.restarts), whole),
        "Faults": shown(len(history.faults), whole),
    } | {head: shown(value, NUMBER) for head, value in last_figures(history).items()}


def phase_table(history: History) -> Table | None:
    """One line per phase; none if no step was recorded."""
    heads = (
        "Phase",
        "Tokens",
        "Steps",
        "Peak rate",
        "Rows",
        "Training loss",
        "Validation loss",
        "Accuracy",
        "Tokens/s",
    )
    columns = {name: history.steps.column(name) for name in ("loss", "lr", "rows", "tokens_per_second")}
    lines = []
    for phase in history.phases()[-MOST_PHASES:]:
        of_phase = slice(phase.first, phase.stop)
        checks = [v for v in history.validations if v.phase == phase.name]
        lr, rows = (_finite(columns[name][of_phase]) for name in ("lr", "rows"))
        ends = dict.fromkeys([] if not len(rows) else [whole(float(rows.min())), whole(float(rows.max()))])
        cells = (
            phase.name,
            tokens_text(phase.end - phase.start),
            whole(phase.stop - phase.first),
            rate(float(lr.max(initial=0.0))),
            " to ".join(ends),
            _shown(_final(columns["loss"][of_phase]), LOSS),
            LOSS(checks[-1].loss) if checks else "none",
            ACCURACY(checks[-1].accuracy) if checks else "none",
            _shown(_median(columns["tokens_per_second"][of_phase]), whole),
        )
        lines.append(cells)
    return Table("Phases", heads, lines) if lines else None


def warnings(history: History) -> list[str]:
    """What the curves could hide: losses that are not numbers, damaged lines."""
    notes = []
    broken = np.flatnonzero(~np.isfinite(history.steps.column("loss")))
    if len(broken):
        notes.append(
            f"{plural(len(broken), 'step')} with a loss that is not a number, first at step "
            f"{history.steps[int(broken[0])].step:,}; the curves have gaps there."
        )
    if history.unreadable_lines:
        notes.append(
            f"{plural(history.unreadable_lines, 'line')} of metrics.jsonl could not be read and was left out; "
            "a process killed while writing leaves one."
        )
    return notes


def _final(losses: NDArray[np.float64]) -> float:
    """Training loss at the end; not a number where no loss is one."""
    loss = training_loss(losses[-LOSS_STEPS:].tolist())
    return math.nan if loss is None else loss


def _median(values: NDArray[np.float64]) -> float:
    known = _finite(values)
    return float(np.median(known)) if len(known) else math.nan


def _finite(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values[np.isfinite(values)]


def _shown(value: float, text: Callable[[float], str]) -> str:
    return text(value) if math.isfinite(value) else "none"


def _validated(last: ValidationRecord | None) -> str:
    return f"at {tokens_text(last.tokens)} tokens" if last else "no validation yet"


def _accuracy_to_beat(last: ValidationRecord | None) -> str:
    return f"baseline {ACCURACY(last.unigram_accuracy)}" if last else "no validation yet"


def _last_restart(history: History) -> str:
    if not history.restarts:
        return "ran through"
    return f"last at {tokens_text(history.restarts[-1].tokens)} tokens"
