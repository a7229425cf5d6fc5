"""Read and write state.json of a checkpoint: everything that is not a tensor, typed and validated.

It is read once, when the checkpoint is opened. Hashes show whether the disk has changed it; this module checks that it
belongs to the step, and that a run can have written it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

from modernbert_train.config.schema import RunConfig
from modernbert_train.core.read_json import Count, as_type, read_json
from modernbert_train.data.planner_state import PlannerState


class SavedTime(TypedDict):
    """Composer's Timestamp, without the times of day."""

    iteration: Count
    epoch: Count
    batch: Count
    sample: Count
    token: Count
    epoch_in_iteration: Count
    token_in_iteration: Count
    batch_in_epoch: Count
    sample_in_epoch: Count
    token_in_epoch: Count


class SkippedUpdate(TypedDict):
    """A skipped update, and the range of its global tokens."""

    step: Count
    fault: str
    action: str
    tokens: tuple[Count, Count]


class GuardState(TypedDict):
    """State of the guard against unstable steps; see stability.py.

    Attributes:
        phase: of the losses.
        losses: the recent ones, for comparison with the next one.
        skipped_updates: so far.
        unlabelled_steps: steps so far without a label.
    """

    phase: str | None
    losses: list[float]
    skipped_updates: list[SkippedUpdate]
    unlabelled_steps: Count


@dataclass(frozen=True)
class TrainingState:
    """State needed to continue training, which an average lacks.

    Attributes:
        seconds: of training so far.
        timestamp: Composer's.
        loader: data cursor.
        stability: the guard's.
    """

    seconds: float
    timestamp: SavedTime
    loader: PlannerState
    stability: GuardState


@dataclass(frozen=True)
class Averaged:
    """A checkpoint in an average; `weight` is its share."""

    checkpoint: str
    step: Count
    tokens: Count
    weight: float


@dataclass(frozen=True)
class SavedState:
    """Clock, data position and everything else that is not a tensor.

    Attributes:
        step: optimizer steps done.
        tokens: global tokens seen.
        phase: of the last step; `tokens` does not determine it, since the last batch passes the phase's end.
        data: hash of each part of the data, by name; see fingerprint.py.
        training: None for an average.
        average: checkpoints in an average; empty for other checkpoints.
        averaged_by: method of the average, as text; `mean` in older files.
    """

    step: Count
    tokens: Count
    phase: str
    data: dict[str, str]
    training: TrainingState | None
    average: list[Averaged]
    averaged_by: str = "mean"

    def as_json(self) -> str:
        """Return the text of state.json."""
        return json.dumps(asdict(self), allow_nan=False)


def read_state(path: Path, config: RunConfig, step: int) -> SavedState:
    """Read and validate a state.

    Args:
        path: of state.json.
        config: that was saved with it.
        step: of the checkpoint, by its manifest.

    Raises:
        OSError: the file cannot be read.
        ValueError: a run with this configuration cannot have written it; names the field.
    """
    state: SavedState = as_type(SavedState, read_json(path))
    _require(state.step == step, "step", f"{step}, as the manifest says", state.step)
    _require(state.phase in config.phases, "phase", f"one of {', '.join(config.phases)}", state.phase)
    _require("tokenizer" in state.data, "data.tokenizer", "its hash", "nothing")
    if state.training is not None:
        cursor = state.training.loader
        _require(cursor["tokens"] == state.tokens, "training.loader.tokens", str(state.tokens), cursor["tokens"])
        timestamp = state.training.timestamp
        _require(timestamp["batch"] == step, "training.timestamp.batch", str(step), timestamp["batch"])
        _require(timestamp["token"] == state.tokens, "training.timestamp.token", str(state.tokens), timestamp["token"])
    return state


def _require(holds: bool, name: str, expected: str, found: object) -> None:
    if not holds:
        raise ValueError(f"{name}: expected {expected}, found {str(found)[:60]}")
