"""Compute effective training time from a run's records: steps that count, checkpoints, restarts.

    effective training time = seconds of the steps that count, each once / seconds since the first start

A step counts if the present weights have seen it; a step that was lost with a killed process and repeated counts
once. The rest is overhead: starting, validating, waiting for checkpoints, lost steps, and pauses between processes. A
restart takes from the last line of the lost process to the end of the next process's first step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modernbert_train.checkpoints.provenance import STARTS
from modernbert_train.core.read_json import is_count, number, read_lines
from modernbert_train.core.text import duration, percent, plural

FORMULA = "seconds of the steps that count, each once, by seconds since the first start"
# in starts.jsonl: time of the previous process's last line; kind of the line for the first step of a restart
LAST_SIGN, FIRST_STEP = "last_sign", "first_step"


@dataclass(frozen=True)
class Spent:
    """Seconds of a run.

    Attributes:
        steps: spent in the steps that count.
        since_start: from the first start to the last line.
        blocked: delay of the steps by each checkpoint.
        writing: writing each checkpoint in the background.
        restarts: from the last line of a process to the end of the next one's first step.
        last_saved: step of the newest checkpoint in the record; None without any.
    """

    steps: float
    since_start: float
    blocked: tuple[float, ...]
    writing: tuple[float, ...]
    restarts: tuple[float, ...]
    last_saved: int | None = None

    @property
    def effective(self) -> float:
        """The effective share of the time; NaN if unknown."""
        return min(1.0, self.steps / self.since_start) if self.since_start > 0 else math.nan

    def __str__(self) -> str:
        if not math.isfinite(self.effective):
            return "effective training time: not known"
        text = (
            f"effective training time {percent(1)(self.effective)}: {duration(self.steps)} in steps that count, of "
            f"{duration(self.since_start)} since the first start"
        )
        if self.blocked:
            text += (
                f"; {plural(len(self.blocked), 'checkpoint')} held steps up for {sum(self.blocked):.3g} s, at most "
                f"{max(self.blocked):.2g} s"
            )
        if self.restarts:
            took = f"{self.restart_text} from the last line to the next step, in the median"
            text += f"; {plural(len(self.restarts), 'restart')}, {took}"
        return text

    @property
    def restart_text(self) -> str:
        """The median time from the last line of a process to the first step of the next."""
        return duration(statistics.median(self.restarts)) if self.restarts else "none"


def spent(run_folder: Path) -> Spent:
    """Read where the time of a run went.

    Raises:
        OSError: a record cannot be read.
    """
    return spent_by(read_lines(run_folder / "metrics.jsonl")[0], read_lines(run_folder / STARTS)[0])


def spent_by(entries: Sequence[Mapping[str, Any]], starts: Sequence[Mapping[str, Any]]) -> Spent:
    """Compute `spent` from lines of metrics.jsonl and of starts.jsonl."""
    counted = [(entry["step"], entry) for entry in entries if is_count(entry.get("step"))]  # the file may hold anything
    steps = {step: seconds_of(entry, "seconds") for step, entry in counted if entry.get("kind") == "step"}
    times = [time for entry in entries if (time := seconds_of(entry, "time")) > 0]
    return spent_of(
        steps=sum(steps.values()),
        saved={step: cost_of(entry) for step, entry in counted if entry.get("kind") == "checkpoint"},
        first=min(times, default=math.nan),
        last=max(times, default=math.nan),
        starts=starts,
    )


def spent_of(
    *,
    steps: float,
    saved: Mapping[int, tuple[float, float]],
    first: float,
    last: float,
    starts: Sequence[Mapping[str, Any]],
) -> Spent:
    """Compute `spent` from sums over the lines.

    Args:
        steps: seconds of the steps that count.
        saved: `cost_of` each checkpoint, by step.
        first, last: unix time of the record's earliest and latest line.
        starts: lines of starts.jsonl.
    """
    begun = [time for entry in starts if entry.get("kind") == "start" and (time := seconds_of(entry, "time")) > 0]
    restarts, last_sign = [], 0.0
    for entry in starts:
        if entry.get("kind") == "start":
            last_sign = seconds_of(entry, LAST_SIGN)
        elif entry.get("kind") == FIRST_STEP and last_sign > 0:
            restarts.append(max(0.0, seconds_of(entry, "time") - last_sign))
            last_sign = 0.0
    return Spent(
        steps=steps,
        since_start=last - min(begun, default=first),
        blocked=tuple(blocked for blocked, _ in saved.values()),
        writing=tuple(writing for _, writing in saved.values()),
        restarts=tuple(restarts),
        last_saved=max(saved, default=None),
    )


def cost_of(entry: Mapping[str, Any]) -> tuple[float, float]:
    """Return the seconds by which a checkpoint delayed a step, and its seconds in the background, from its line."""
    return seconds_of(entry, "blocked_seconds"), seconds_of(entry, "write_seconds")


def seconds_of(entry: Mapping[str, Any], key: str) -> float:
    """Return a positive number of a line, else 0: the file may hold anything."""
    seconds = number(entry.get(key))
    return seconds if seconds is not None and math.isfinite(seconds) and seconds > 0 else 0.0
