"""Compare a gain with the spread of seeds: groups of runs that differ only in their seed."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from modernbert_train.config.read_yaml import read_yaml
from modernbert_train.core.text import printable
from modernbert_train.errors import ConfigError
from modernbert_train.report.run_list import RunState

_OWN = ("name", "seed", "runs_folder")  # keys in which two repetitions of a run differ


def seed_lines(runs: Sequence[RunState]) -> list[str]:
    """Return a line for each group of finished runs, and for each gap between neighbouring mean losses.

    Only losses of the same objective on the same held-out text are compared, see `RunState.measured`; of several runs
    with the same seed the first by name counts. The standard error of a difference is s sqrt(1 / n + 1 / m) for n and m
    seeds, with the standard deviation s pooled over all groups. Nothing is returned if no run was repeated with another
    seed.
    """
    measured: dict[str | None, dict[str, dict[Any, RunState]]] = {}
    for run in sorted(runs, key=lambda run: run.name):
        if run.state == "finished" and run.held_out_loss is not None and math.isfinite(run.held_out_loss):
            settings, seed = _settings(run)
            measured.setdefault(run.measured, {}).setdefault(settings, {}).setdefault(seed, run)
    return [line for groups in measured.values() for line in _compared([[*each.values()] for each in groups.values()])]


def _compared(groups: Sequence[Sequence[RunState]]) -> list[str]:
    losses = {each[0].name: [run.held_out_loss or 0.0 for run in each] for each in groups}
    degrees = sum(len(each) - 1 for each in losses.values())
    if not degrees:
        return []
    squares = sum(statistics.variance(each) * (len(each) - 1) for each in losses.values() if len(each) > 1)
    spread, means = math.sqrt(squares / degrees), {name: statistics.fmean(each) for name, each in losses.items()}
    ordered = sorted(losses, key=lambda name: means[name])
    lines = [
        f"seeds: {printable(name)} and its repetitions: held-out loss {means[name]:.4f} over {len(losses[name])} seeds"
        for name in ordered
        if len(losses[name]) > 1
    ]
    lines.append(f"seeds: standard deviation {spread:.4f}, pooled; a difference below two standard errors is noise")
    for low, high in pairwise(ordered):
        error = spread * math.sqrt(1 / len(losses[low]) + 1 / len(losses[high]))
        gain = means[high] - means[low]
        times = f"{gain / error:.1f} standard errors" if error else "with no spread between seeds"
        lines.append(f"seeds: {printable(low)} is {gain:.4f} below {printable(high)}, {times}")
    return lines


def _settings(run: RunState) -> tuple[str, Any]:
    """Return the configuration of a run without its name, folder and seed, and the seed; its folder if unreadable."""
    try:
        tree = read_yaml(Path(run.folder) / "config.yaml", {}, [])
    except ConfigError:
        return run.folder, None
    kept = {key: value for key, value in tree.items() if key not in _OWN}
    return json.dumps(kept, sort_keys=True, default=str), tree.get("seed")
