"""state.json of a checkpoint: all that is not a tensor, typed, and found to be what a run can have written.

It is read once, when the checkpoint is opened. Hashes tell whether the disk has changed it; what is asked here is
whether it is that of this step.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

from modernbert_train.config.schema import RunConfig
from modernbert_train.core.read_json import Count, as_type, read_json
from modernbert_train.data.place import PlannerState


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
    """An update that was left out, and the range of global tokens that were left out with it."""

    step: Count
    fault: str
    action: str
    tokens: tuple[Count, Count]


class GuardState(TypedDict):
    """The guard's memory; see stability.py.

    Attributes:
        phase: that the losses belong to.
        losses: that the next one is compared with.
        skipped_updates: every update left out so far.
        unlabelled_steps: steps so far without one label.
    """

    phase: str | None
    losses: list[float]
    skipped_updates: list[SkippedUpdate]
    unlabelled_steps: Count


@dataclass(frozen=True)
class TrainingState:
    """What going on needs, and an average has not.

    Attributes:
        seconds: of training so far.
        timestamp: Composer's.
        loader: the place in the data.
        stability: the guard's.
    """

    seconds: float
    timestamp: SavedTime
    loader: PlannerState
    stability: GuardState


@dataclass(frozen=True)
class Averaged:
    """A checkpoint that an average is made of; `weight` is its share."""

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
        phase: of the last step: its tokens do not tell, since the last batch passes the phase's end.
        data: hash of each part of the data, by name; see fingerprint.py.
        training: None of an average.
        average: what an average is made of; empty for all others.
        averaged_by: how, in words; of older files the mean.
    """

    step: Count
    tokens: Count
    phase: str
    data: dict[str, str]
    training: TrainingState | None
    average: list[Averaged]
    averaged_by: str = "mean"

    def as_json(self) -> str:
        """As it stands in state.json."""
        return json.dumps(asdict(self), allow_nan=False)


def read_state(path: Path, config: RunConfig, step: int) -> SavedState:
    """Read a state and make sure of it.

    Args:
        path: of state.json.
        config: that was saved with it.
        step: of the checkpoint, by its manifest.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not what a run with this configuration has written; names the field.
    """
    state: SavedState = as_type(SavedState, read_json(path))
    _require(state.step == step, "step", f"{step}, as the manifest says", state.step)
    _require(state.phase in config.phases, "phase", f"one of {', '.join(config.phases)}", state.phase)
    _require("tokenizer" in state.data, "data.tokenizer", "its hash", "nothing")
    if state.training is not None:
        place = state.training.loader
        _require(place["tokens"] == state.tokens, "training.loader.tokens", str(state.tokens), place["tokens"])
    return state


def _require(holds: bool, name: str, expected: str, found: object) -> None:
    if not holds:
        raise ValueError(f"{name}: expected {expected}, found {str(found)[:60]}")
