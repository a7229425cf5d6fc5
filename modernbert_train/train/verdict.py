"""Judge a step and decide what is done about it: pure functions of numbers that every rank has alike.

stability.py measures the step, asks here, and acts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from modernbert_train.checkpoints.checkpoint import Checkpoint, newest_valid
from modernbert_train.clock import Clock, Position
from modernbert_train.config.schema import StabilityConfig
from modernbert_train.train.spikes import highest_normal_loss

Fault = Literal["non_finite", "spike"]


def judge(
    settings: StabilityConfig,
    now: Position,
    losses: Sequence[float],
    *,
    predicted: int,
    loss: float,
    grad_norm: float,
) -> Fault | None:
    """What is wrong with a step; None if nothing is.

    Args:
        settings: the run's.
        now: of the step.
        losses: of the batches of this phase before it, at most spike_window_batches; in nats.
        predicted: labels in the global batch. One without any says nothing, and is not compared.
        loss, grad_norm: of the global batch.

    Returns:
        `spike` only once the window is full and the phase's warmup is over: before that a loss has no normal height.
    """
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        return "non_finite"
    warming_up = now.tokens < now.phase.schedule.warmup_tokens
    if warming_up or predicted == 0 or len(losses) < settings.spike_window_batches:
        return None
    highest = highest_normal_loss(losses, settings.spike_deviations, settings.spike_min_rise)
    return "spike" if loss > highest else None


def why_stop(settings: StabilityConfig, action: str, *, done: int, damaged_weights: bool) -> str | None:
    """Why a step cannot be answered as the configuration says and the run ends instead; None if it can.

    Args:
        settings: the run's.
        action: skip or roll_back, as they say; all others are done as they stand.
        done: how many times the run has done the same before.
        damaged_weights: a weight is not finite.
    """
    if action == "skip" and damaged_weights:
        return "the weights themselves are not finite, so skipping cannot help"
    if action == "skip" and done >= settings.max_skips:
        return f"stability.max_skips={settings.max_skips} is reached"
    if action == "roll_back" and done >= settings.max_roll_backs:
        return f"stability.max_roll_backs={settings.max_roll_backs} is reached"
    return None


def find_target(
    settings: StabilityConfig, clock: Clock, checkpoints: Path, *, fault: str, step: int, tokens_before: int
) -> Checkpoint | None:
    """The checkpoint to roll back to: the newest whole one of the step's phase, from a spike as old as asked for.

    Args:
        settings, clock: the run's.
        checkpoints: its folder of them.
        fault, step, tokens_before: what is wrong with which step, and global tokens seen before it.

    Raises:
        StorageError: there are some that are old enough, and none is whole.
    """
    distance = settings.spike_roll_back_batches if fault == "spike" else 0
    return _of_phase(clock, checkpoints, step - 1 - distance, tokens_before)


def find_target_again(clock: Clock, checkpoints: Path, *, name: str, tokens_before: int) -> Checkpoint | None:
    """The one that was gone back to before, by its name, as long as it is there."""
    return _of_phase(clock, checkpoints, int(name.split("-")[1]), tokens_before)


def _of_phase(clock: Clock, checkpoints: Path, last_step: int, tokens_before: int) -> Checkpoint | None:
    found, _ = newest_valid(checkpoints, last_step)
    if found is None:
        return None
    tokens = (found.state.tokens, tokens_before)
    return found if len({clock.at(each).index for each in tokens}) == 1 else None
