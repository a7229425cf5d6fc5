"""Read and write state.json of a checkpoint: everything that is not a tensor, typed and validated.

It is read once, when the checkpoint is opened. Hashes show whether the disk has changed it; this module checks that it
belongs to the step, and that a run can have written it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

from modernbert_train.clock import Clock
from modernbert_train.config.schema import RunConfig
from modernbert_train.core.read_json import Count, as_type, read_json
from modernbert_train.data.planner_state import PlannerState

_MAX_SECONDS = 1_000_000_000  # 30 years


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
        _check_training(state, state.training, Clock.of(config))
    return state


def _check_training(state: SavedState, training: TrainingState, clock: Clock) -> None:
    """Check the numbers of a step against its tokens; a plugin's objective may have any loss."""
    step, tokens, now = state.step, state.tokens, clock.phase(state.phase)
    start = sum(each.phase.tokens for each in clock.phases[: now.index])
    # its last batch began in the phase and may have passed the end
    end = start + now.phase.tokens + now.phase.batch_rows * now.phase.row_tokens
    _require(start < tokens < end or not step, "phase", f"the one of the batch before {tokens} tokens", state.phase)
    # a clock of the machine that was set back makes it smaller
    _require(abs(training.seconds) < _MAX_SECONDS, "training.seconds", f"below {_MAX_SECONDS}", training.seconds)
    rows = training.timestamp["sample"]
    _require(step <= rows <= tokens, "training.timestamp.sample", f"{step} to {tokens} rows", rows)
    epoch = training.timestamp["epoch"]  # to Composer a run is one
    _require(epoch == 0, "training.timestamp.epoch", "0", epoch)
    guard = training.stability
    unlabelled = guard["unlabelled_steps"]
    _require(unlabelled <= step, "training.stability.unlabelled_steps", f"at most {step}", unlabelled)
    for number, skipped in enumerate(guard["skipped_updates"]):
        first, last = skipped["tokens"]
        possible = skipped["step"] <= step and first <= last <= tokens
        expected = f"at most step {step} and a range up to {tokens} tokens"
        _require(possible, f"training.stability.skipped_updates[{number}]", expected, skipped)


def _require(holds: bool, name: str, expected: str, value: object) -> None:
    if not holds:
        raise ValueError(f"{name}: expected {expected}, found {str(value)[:60]}")
