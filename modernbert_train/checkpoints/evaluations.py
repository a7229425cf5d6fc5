"""Keep measurements of a run's checkpoints after training, in evaluations.jsonl of the run's folder.

Only `eval` and `finetune` write to the file: a line for each measurement, never rewritten. A line names the weights by
their hash, so a result is never shown for other weights.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modernbert_train.core.files import append_line, errors_to, warn
from modernbert_train.core.read_json import is_count, number, read_lines
from modernbert_train.core.text import shorten
from modernbert_train.core.version import __version__

EVALUATIONS = "evaluations.jsonl"
_LETTERS, _MAX_FIGURES = 80, 100
_NOT_SHOWN = ("num_", "baseline/")


@dataclass(frozen=True)
class Result:
    """Figures of a checkpoint.

    Attributes:
        name: of the measurement.
        figures: by name; values that are not numbers are left out.
        checkpoint, step, weights: the folder's name, its step, and the hash of its weights.
        seed: of a fine-tuning; else None.
        version: of this program.
        time: unix time.
    """

    name: str
    figures: Mapping[str, float]
    checkpoint: str
    step: int
    weights: str
    seed: int | None
    version: str
    time: float

    @property
    def shown(self) -> dict[str, float]:
        """The figures without counts and baselines."""
        return {name: value for name, value in self.figures.items() if not name.startswith(_NOT_SHOWN)}


def run_of(checkpoint: Path) -> Path | None:
    """Return the folder of the run that contains a checkpoint; None if it is outside of a run."""
    folder = checkpoint.parent
    return folder.parent if folder.name == "checkpoints" and (folder.parent / "config.yaml").is_file() else None


def keep_result(
    checkpoint: Path, name: str, figures: Mapping[str, float], *, step: int, weights: str, seed: int | None = None
) -> None:
    """Add a result to the run of a checkpoint, unless it is recorded already; warn if the file cannot be written.

    Args:
        checkpoint: its folder.
        name, figures, seed: see `Result`.
        step, weights: of the checkpoint.
    """
    run = run_of(checkpoint)
    if run is None:
        return
    entry = {
        "kind": "evaluation",
        "name": name,
        "checkpoint": checkpoint.name,
        "step": step,
        "weights": weights,
        "seed": seed,
        "figures": {key: value if math.isfinite(value) else None for key, value in figures.items()},
        "version": __version__,
    }
    file = run / EVALUATIONS
    with errors_to(warn, OSError, before=f"{file}: cannot be written, so the figures are not kept: "):
        if not any({key: each.get(key) for key in entry} == entry for each in read_lines(file)[0]):
            append_line(file, json.dumps(entry | {"time": round(time.time(), 3)}))


def read_results(run_folder: Path) -> list[Result]:
    """Return the results of a run in the order of measurement; unreadable lines are left out."""
    with suppress(OSError):
        entries, _ = read_lines(run_folder / EVALUATIONS)
        return [result for entry in entries if (result := _result(entry)) is not None]
    return []


def _result(entry: Mapping[str, Any]) -> Result | None:
    figures, step, seed = entry.get("figures"), entry.get("step"), entry.get("seed")
    if not isinstance(figures, dict) or not is_count(step) or not isinstance(entry.get("name"), str):
        return None
    finite_or_none = {shorten(key, _LETTERS): number(value) for key, value in list(figures.items())[:_MAX_FIGURES]}
    when = number(entry.get("time"))
    return Result(
        name=shorten(entry["name"], _LETTERS),
        figures={key: value for key, value in finite_or_none.items() if value is not None and math.isfinite(value)},
        checkpoint=shorten(str(entry.get("checkpoint", "")), _LETTERS),
        step=step,
        weights=str(entry.get("weights", "")),
        seed=seed if is_count(seed) else None,
        version=shorten(str(entry.get("version", "")), _LETTERS),
        time=math.nan if when is None else when,
    )


def table_rows(results: Sequence[Result]) -> list[tuple[str, str, str, str]]:
    """Return rows of checkpoint, name, figure and value: the last result of each seed, averaged over seeds."""
    last = {(result.checkpoint, result.weights, result.name, result.seed): result for result in results}
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for result in last.values():
        groups.setdefault((result.checkpoint, result.weights, result.name), []).append(result)
    rows = []
    for (checkpoint, _, name), each in groups.items():
        title = name if len(each) == 1 else f"{name}, mean of {len(each)} seeds"
        for figure in dict.fromkeys(figure for result in each for figure in result.shown):
            values = [result.shown[figure] for result in each if figure in result.shown]
            rows.append((checkpoint, title, figure, f"{statistics.fmean(values):.4f}"))
    return rows
