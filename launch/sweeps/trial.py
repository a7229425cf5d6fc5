"""One trial as an ordinary launch: its folder, its lock, its YAML, and the results in its metrics.jsonl.

runs/SWEEP/trial-0003/trial.yaml      the whole configuration; launch/run.py with it continues this trial only
runs/SWEEP/trial-0003/output.txt      output of its processes
runs/SWEEP/trial-0003/...             as in the folder of any run
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from modernbert_train.config.load import to_yaml
from modernbert_train.config.schema import RunConfig
from modernbert_train.core.files import lock_now, write_whole
from modernbert_train.core.read_json import is_count, number, read_lines

TRIAL_YAML = "trial.yaml"
OUTPUT = "output.txt"
_OWN_LOCK = ".sweep.lock"  # held by the worker and, after its death, by the launcher that it started
_RUN_LOCK = ".lock"  # held by the run itself, see checkpoints/run_folder.py

Entry = dict[str, Any]


def hold(folder: Path) -> IO[str] | None:
    """Lock a trial's folder, unless a worker or a dead worker's launcher still uses it.

    Returns:
        The lock, to be passed to the child and closed at the end; None if the folder is in use.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / _OWN_LOCK).open("a+", encoding="utf-8")
    with (folder / _RUN_LOCK).open("a+", encoding="utf-8") as run:
        if lock_now(lock) and lock_now(run):
            return lock
    lock.close()
    return None


def write_yaml(file: Path, config: RunConfig, comments: Sequence[str]) -> None:
    """Write a configuration that runs by itself, atomically."""
    head = "".join(f"# {line}".rstrip() + "\n" for line in comments)
    write_whole(file, f"{head}\n{to_yaml(config)}")


def read_entries(folder: Path, name: str = "metrics.jsonl") -> list[Entry]:
    """Read the complete lines of a run's record; empty if it does not exist yet."""
    return read_lines(folder / name)[0]


def figure(entries: Sequence[Entry], objective: str) -> float | None:
    """Return the figure by which trials are compared.

    Args:
        entries: lines of metrics.jsonl.
        objective: `validation.KEY`, of which the last value counts, or `step.KEY`, of which the median over the second
            half of the steps counts.

    Returns:
        None if it was not recorded; NaN or infinity if it is undefined.
    """
    kind, _, key = objective.partition(".")
    numbers = [number(entry[key]) for entry in entries if entry.get("kind") == kind and key in entry]
    if kind == "validation":  # the last one counts, and a missing number is undefined
        numbers = [math.nan if value is None else value for value in numbers[-1:]]
    values = [value for value in numbers if value is not None]
    return statistics.median(values[len(values) // 2 :]) if values else None


def milestones(entries: Sequence[Entry], objective: str, interval_tokens: int) -> dict[int, float]:
    """Return held-out figures at multiples of the interval, the same for all trials: the first one at or after each.

    Returns:
        tokens -> figure; NaN is kept, since it is worse than all others.
    """
    key = objective.partition(".")[2]
    values: dict[int, float] = {}
    for entry in entries:
        if entry.get("kind") == "validation" and (at := _tokens(entry) // interval_tokens * interval_tokens):
            value = number(entry.get(key))
            values.setdefault(at, math.nan if value is None else value)
    return values


def tokens_seen(entries: Sequence[Entry]) -> int:
    """Return the tokens that a trial has trained on."""
    return next((_tokens(entry) for entry in reversed(entries) if entry.get("kind") == "step"), 0)


def _tokens(entry: Entry) -> int:
    tokens = entry.get("tokens")
    return tokens if is_count(tokens) else 0


def diverged(folder: Path) -> str | None:
    """Return why the run stopped itself (its loss was not finite, or a spike); None if it did not."""
    faults = read_entries(folder, "faults.jsonl")
    if not faults or faults[-1].get("action") != "stop":
        return None
    return f"diverged: {faults[-1].get('fault')} at {_tokens(faults[-1]):,} tokens"
