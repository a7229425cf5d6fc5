"""The numbers of a run: tiles for the whole, a column of figures for the table of runs, and warnings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from modernbert_train.core.text import duration, percent, plural, tokens_text, whole
from modernbert_train.report.curves import History
from modernbert_train.report.effective import FORMULA, Spent, spent_of
from modernbert_train.report.progress import ending
from modernbert_train.report.tables import ACCURACY, FIGURE, LOSS, MAX_FIGURES, final_loss, median, shown
from modernbert_train.report.training_loss import LOSS_STEPS

Newest = Callable[[Path], tuple[str, str]]  # run's folder -> its newest valid checkpoint, and a note


class Figure(NamedTuple):
    """One number of a run: its value for sorting (NaN if unknown), and its text."""

    value: float
    text: str


def spent_in(history: History, starts: Sequence[Mapping[str, Any]]) -> Spent:
    """Return where the time of a run went, from the part of its record read so far."""
    seconds = history.steps.column("own_seconds")
    return spent_of(
        steps=float(seconds[np.isfinite(seconds) & (seconds > 0)].sum()),
        saved=history.saved,
        first=history.earliest,
        last=history.latest,
        starts=starts,
    )


def figures(history: History) -> dict[str, Figure]:
    """Return the figures of a run, by the heads of a table's columns."""
    steps, last = history.steps, history.validations[-1] if history.validations else None
    tokens, number = (steps[-1].tokens, steps[-1].step) if steps else (0, 0)

    def figure(value: float, form: Callable[[float], str]) -> Figure:
        return Figure(value, shown(value, form))

    def validated(name: str, form: Callable[[float], str]) -> Figure:
        value = math.nan if last is None else getattr(last, name)
        return Figure(value, "none" if last is None else form(value))

    evaluated = list(history.by_figure().items())[:MAX_FIGURES]
    return {
        "Training loss": figure(final_loss(steps.column("loss")), LOSS),
        "Validation loss": validated("loss", LOSS),
        "Accuracy": validated("accuracy", ACCURACY),
        "Tokens": figure(tokens, tokens_text),
        "Steps": figure(number, whole),
        "Tokens/s": figure(median(steps.column("tokens_per_second")), whole),
        "MFU": figure(median(steps.column("mfu")), percent(1)),
        "Data wait": figure(median(steps.column("data_wait_share")), percent(1)),
        "Wall time": figure(history.running_seconds, duration),
        "Restarts": figure(len(history.restarts), whole),
        "Faults": figure(len(history.faults), whole),
    } | {f"{name} {key}": figure(records[-1].figures[key], FIGURE) for (name, key), records in evaluated}


def tiles(
    history: History, figure_of: Mapping[str, Figure], spent: Spent, newest: tuple[str, str] | None = None
) -> list[tuple[str, str, str]]:
    """Return the tiles that summarise a run, each a name, a number and a note.

    Args:
        history: the record.
        figure_of: its figures, see `figures`.
        spent: where its time went.
        newest: the newest valid checkpoint, and a note; None to name the last one of the record.
    """
    steps, last = history.steps, history.validations[-1] if history.validations else None
    pause = history.last_time - history.first_time - history.running_seconds
    at = "no validation yet" if last is None else f"at {tokens_text(last.tokens)} tokens"
    guess = "no validation yet" if last is None else f"baseline {ACCURACY(last.unigram_accuracy)}"
    restarted = f"last at {tokens_text(history.restarts[-1].tokens)} tokens" if history.restarts else "ran through"
    packing = shown(median(steps.column("packing_efficiency")), percent(2))
    last_saved = "none" if spent.last_saved is None else f"step {spent.last_saved:,}"
    blocked = f"by {len(spent.blocked)}, at most {max(spent.blocked, default=0.0):.2g} s by one"
    return [
        ("Tokens", figure_of["Tokens"].text, whole(steps[-1].tokens) if steps else ""),
        ("Steps", figure_of["Steps"].text, f"{plural(history.repeated_steps, 'step')} repeated"),
        (
            "Training loss",
            figure_of["Training loss"].text,
            f"mean of last {plural(min(len(steps), LOSS_STEPS), 'step')}",
        ),
        ("Validation loss", figure_of["Validation loss"].text, at),
        ("Unigram baseline", "none" if last is None else LOSS(last.unigram_loss), "loss of guessing"),
        ("Accuracy", figure_of["Accuracy"].text, guess),
        ("Tokens per second", figure_of["Tokens/s"].text, "median over steps"),
        ("Packing efficiency", packing, "median over steps"),
        ("Wall time", figure_of["Wall time"].text, f"and {duration(pause)} paused" if pause >= 1 else "no pause"),
        ("Restarts", figure_of["Restarts"].text, restarted),
        ("Effective training time", shown(spent.effective, percent(1)), FORMULA),
        ("Blocked by checkpoints", f"{sum(spent.blocked):.3g} s", blocked),
        ("Last checkpoint", last_saved, "in the record") if newest is None else ("Newest valid checkpoint", *newest),
        ("Restart time", spent.restart_text, "median, from a process's last line to the next step"),
    ]


def progress_tiles(history: History, total_tokens: float) -> list[tuple[str, str, str]]:
    """Return the progress of a running training and the time left; nothing before its first step."""
    if not history.steps or not total_tokens:
        return []
    last = history.steps[-1]
    done = min(1.0, last.tokens / total_tokens)
    rows = [("Progress", percent(1)(done), f"{tokens_text(last.tokens)} of {tokens_text(total_tokens)} tokens")]
    if math.isfinite(last.seconds_left):
        end = f"ends {ending(last.seconds_left, datetime.fromtimestamp(history.last_time))}"
        rows.append(("Time left", duration(last.seconds_left), end))
    return rows


def warnings(history: History) -> list[str]:
    """Return warnings of losses that are not numbers, and of damaged lines, which the curves cannot show."""
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
