"""Choose the epoch of a fine-tuning: the last, or the one with the best metric on the first measured split.

With `best`, the run keeps a checkpoint of every epoch until its end; then only the best and the last remain.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from modernbert_train.checkpoints.checkpoint import Checkpoint, folder_of, newest_checkpoint, verify
from modernbert_train.checkpoints.removal import remove
from modernbert_train.checkpoints.run_folder import RunFolder
from modernbert_train.checkpoints.verified import step_folders
from modernbert_train.config.schema import RunConfig
from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.errors import DataError

Figures = dict[str, dict[str, float]]  # by split


class Outcome(NamedTuple):
    """Result of a fine-tuning.

    Attributes:
        checkpoint: the chosen one.
        figures: its measurements.
        epoch: its epoch, from 1, if `best` chose it.
    """

    checkpoint: Checkpoint
    figures: Figures
    epoch: int | None = None


def find_outcome(config: RunConfig, task: TaskConfig) -> Outcome:
    """Return the chosen checkpoint and its figures.

    Raises:
        DataError: metrics.jsonl lacks measurements.
        StorageError: the checkpoint is damaged.
    """
    measured, split = _measured(config), next(iter(task.validation))
    values = {} if task.best is None else {
        epoch: value
        for epoch, (_, figures) in enumerate(measured, start=1)
        if (value := figures.get(split, {}).get(task.best)) is not None and math.isfinite(value)
    }  # fmt: skip
    if not values:  # no choice, or an undefined figure at every epoch, such as the correlation of one constant
        last = measured[-1][1] if measured and measured[-1][0]["tokens"] >= config.total_tokens else {}
        if missing := [name for name in config.evals if name not in last]:
            raise DataError(
                f"{config.folder}/metrics.jsonl: lacks figures of {', '.join(missing)} at the end. Measure again: "
                f"python -m modernbert_train eval {config.folder}"
            )
        return Outcome(newest_checkpoint(config.folder), last, None if task.best is None else len(measured))
    checkpoints, sign = RunFolder(config).checkpoints, -1.0 if task.best == "loss" else 1.0
    epochs = [
        (sign * value, -epoch, step)  # of ties the earliest
        for epoch, value in values.items()
        if folder_of(checkpoints, step := measured[epoch - 1][0]["step"]).is_dir()
    ]
    if not epochs:
        raise DataError(
            f"{config.folder}/metrics.jsonl: lacks {split}'s {task.best} for every existing checkpoint "
            f"(best={task.best}). Leave best out; or train again under another name=."
        )
    _, epoch, step = max(epochs)
    return Outcome(verify(folder_of(checkpoints, step)), measured[-epoch - 1][1], -epoch)


def remove_others(config: RunConfig, outcome: Outcome) -> None:
    """Remove the checkpoints of all other epochs, except the newest, which shows that the run is finished."""
    folders = step_folders(RunFolder(config).checkpoints)
    remove([path for path in folders[:-1] if path.name != outcome.checkpoint.folder.name])


def _measured(config: RunConfig) -> list[tuple[dict[str, Any], Figures]]:
    """Return the entry and the figures of all splits for each measured step."""
    by_step: dict[int, tuple[dict[str, Any], Figures]] = {}
    for entry in RunFolder(config).read_metrics():
        if entry.get("kind") == "evaluation" and entry.get("step", 0) > 0 and entry.get("name") in config.evals:
            by_step.setdefault(entry["step"], (entry, {}))[1][entry["name"]] = entry["figures"]
    return [by_step[step] for step in sorted(by_step)]
