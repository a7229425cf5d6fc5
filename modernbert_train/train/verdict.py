"""Judge a step and choose the reaction, by pure functions of numbers that are equal on every rank.

stability.py measures the step, calls these functions, and acts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Literal

from modernbert_train.checkpoints.checkpoint import Checkpoint, newest_valid
from modernbert_train.clock import Clock, Position
from modernbert_train.config.schema import StabilityConfig

Fault = Literal["non_finite", "spike"]
_TO_STANDARD_DEVIATION = 1.4826  # of a normal distribution: standard deviation / median absolute deviation


def highest_normal_loss(losses: Sequence[float], deviations: float, min_rise: float) -> float:
    """Return the loss above which the next one is a spike.

    Median and median absolute deviation: spikes that were let through must not raise the bar for the next one.

    Args:
        losses: losses of the batches before, at least one, in nats.
        deviations: robust standard deviations above the median that are still normal.
        min_rise: nats above the median that are normal even if all losses were equal.

    Returns:
        median + max(min_rise, deviations * 1.4826 * median(|loss - median|)), in nats.
    """
    middle = median(losses)
    deviation = _TO_STANDARD_DEVIATION * median(abs(loss - middle) for loss in losses)
    return middle + max(min_rise, deviations * deviation)


def judge(
    settings: StabilityConfig,
    now: Position,
    losses: Sequence[float],
    *,
    predicted: int,
    loss: float,
    grad_norm: float,
) -> Fault | None:
    """Return the fault of a step, or None.

    Args:
        settings: the run's section `stability`.
        now: position of the step.
        losses: losses of this phase's batches before, at most spike_window_batches, in nats.
        predicted: labels in the global batch; a batch without labels is not compared.
        loss, grad_norm: of the global batch.

    Returns:
        `spike` only once the window is full and the phase's warmup is over: earlier losses have no normal level yet.
    """
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        return "non_finite"
    warming_up = now.tokens < now.phase.schedule.warmup_tokens
    if warming_up or predicted == 0 or len(losses) < settings.spike_window_batches:
        return None
    highest = highest_normal_loss(losses, settings.spike_deviations, settings.spike_min_rise)
    return "spike" if loss > highest else None


def why_stop(settings: StabilityConfig, action: str, *, done: int, damaged_weights: bool) -> str | None:
    """Return the reason why the run must end although the configuration says to continue; None if it can continue.

    Args:
        settings: the run's section `stability`.
        action: skip or roll_back; any other action is not limited.
        done: times the run has taken this action before.
        damaged_weights: True if a weight is not finite.
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
    """Return the checkpoint to roll back to: the newest whole one of the phase, old enough to precede a spike.

    Args:
        settings, clock: the run's.
        checkpoints: folder of the run's checkpoints.
        fault, step, tokens_before: the fault, its step, and global tokens before that step.

    Raises:
        StorageError: some are old enough, and none of these is whole.
    """
    distance = settings.spike_roll_back_batches if fault == "spike" else 0
    return _of_phase(clock, checkpoints, step - 1 - distance, tokens_before)


def find_target_again(clock: Clock, checkpoints: Path, *, name: str, tokens_before: int) -> Checkpoint | None:
    """Return the checkpoint of an earlier rollback by its name; None if it is gone."""
    return _of_phase(clock, checkpoints, int(name.split("-")[1]), tokens_before)


def _of_phase(clock: Clock, checkpoints: Path, last_step: int, tokens_before: int) -> Checkpoint | None:
    newest, _ = newest_valid(checkpoints, last_step)
    if newest is None:
        return None
    tokens = (newest.state.tokens, tokens_before)
    return newest if len({clock.at(each).index for each in tokens}) == 1 else None
