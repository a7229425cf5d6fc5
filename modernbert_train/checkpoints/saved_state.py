"""state.json of a checkpoint: all that is not a tensor, typed, and found to be what a run can have written.

It is read once, when the checkpoint is opened. Hashes tell whether the disk has changed it; what is asked here is
whether it makes sense: a place that no run was at is not gone on from, whoever wrote it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

from modernbert_train.config.schema import RunConfig
from modernbert_train.core.read_json import Count, as_type, read_json
from modernbert_train.data.place import PlannerState, check_numbers

_MOST_SECONDS = 1e10  # three hundred years


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
    found = read_json(path)
    state: SavedState = as_type(SavedState, {"averaged_by": "mean", **found} if isinstance(found, dict) else found)
    _require(state.step == step, "step", f"{step}, as the manifest says", state.step)
    _require(state.phase in config.phases, "phase", f"one of {', '.join(config.phases)}", state.phase)
    _require("tokenizer" in state.data, "data.tokenizer", "its hash", "nothing")
    last_batch = max(phase.batch_rows * phase.row_tokens for phase in config.phases.values())
    most = config.total_tokens + last_batch
    _require(state.step <= state.tokens <= most, "tokens", f"from step={state.step} to {most}", state.tokens)
    _require((state.training is None) == bool(state.average), "training", "this or an average", state.training)
    if state.training is not None:
        _check_training(state, state.training, config)
    return state


def _check_training(state: SavedState, training: TrainingState, config: RunConfig) -> None:
    _require(0 <= training.seconds <= _MOST_SECONDS, "training.seconds", "a duration", training.seconds)
    equal: dict[str, tuple[object, object]] = {
        "timestamp.batch": (training.timestamp["batch"], state.step),
        "timestamp.token": (training.timestamp["token"], state.tokens),
        "loader.tokens": (training.loader["tokens"], state.tokens),
        "loader.phase": (training.loader["phase"], state.phase),
        "loader.streams": (sorted(training.loader["streams"]), sorted(config.data.all_streams)),
    }
    for name, (found, expected) in equal.items():
        _require(found == expected, f"training.{name}", str(expected), found)
    try:
        special = config.objective.special_tokens
        check_numbers(training.loader, config.data, config.phases.values(), special, own=config.start is None)
    except ValueError as error:
        raise ValueError(f"training.loader.{error}") from None
    guard = training.stability
    _require(
        guard["unlabelled_steps"] <= state.step,
        "training.stability.unlabelled_steps",
        f"at most {state.step}",
        guard["unlabelled_steps"],
    )
    known = guard["phase"] is None or guard["phase"] in config.phases
    _require(known, "training.stability.phase", "a phase of the run", guard["phase"])


def _require(holds: bool, name: str, expected: str, found: object) -> None:
    if not holds:
        raise ValueError(f"{name}: expected {expected}, found {str(found)[:60]}")
