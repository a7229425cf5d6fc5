"""Verdicts on a step and the reactions, case by case; whole runs of the same: train/test_stability.py.

A missed case ends weeks of training, or lets a broken update into every later checkpoint.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modernbert_train.checkpoints.manifest import STATE
from modernbert_train.checkpoints.run_folder import RunFolder
from modernbert_train.clock import Clock
from modernbert_train.config.load import load_run
from modernbert_train.config.schema import RunConfig, StabilityConfig
from modernbert_train.errors import StorageError
from modernbert_train.train.stability import Guard
from modernbert_train.train.verdict import find_target, find_target_again, highest_normal_loss, judge, why_stop
from tests.support.small_checkpoint import write

INF, NAN = math.inf, math.nan
CALM = [2.0, 2.2, 1.8, 2.0]  # median 2, deviation 1.4826 * 0.1; normal up to 2 + max(0.5, 2 * 0.14826) = 2.5
LIVELY = [1.0, 3.0, 2.0, 2.0, 4.0, 0.0]  # median 2, deviation 1.4826; normal up to 2 + 2 * 1.4826 = 4.9652


def run_with(window: int = 4, *overrides: str) -> RunConfig:
    """Return a run with phase short of 100 tokens, 20 of warmup, and long of 100 without."""
    phase = "row_tokens: 8, batch_rows: 2, microbatch_tokens: 8"
    return load_run(
        [],
        [
            *("name=judged", "data.train=absent", "data.tokenizer=absent", "optim.lr=1"),
            f"phases.short={{tokens: 100, {phase}, schedule: {{warmup_tokens: 20}}}}",
            f"phases.long={{tokens: 100, {phase}}}",
            f"stability.spike_window_batches={window}",
            *("stability.spike_deviations=2", "stability.spike_min_rise=0.5"),
            *overrides,
        ],
    )


@pytest.mark.parametrize(
    ("losses", "window", "tokens_before", "predicted", "loss", "grad_norm", "found"),
    [
        pytest.param(CALM, 4, 50, 9, 2.0, 1.0, None, id="all is well"),
        pytest.param(CALM, 4, 50, 9, NAN, 1.0, "non_finite", id="the loss is NaN"),
        pytest.param(CALM, 4, 50, 9, INF, 1.0, "non_finite", id="the loss is infinite"),
        pytest.param(CALM, 4, 50, 9, -INF, 1.0, "non_finite", id="the loss is minus infinity"),
        pytest.param(CALM, 4, 50, 9, 2.0, INF, "non_finite", id="the gradient is infinite"),
        pytest.param(CALM, 4, 50, 9, 2.0, NAN, "non_finite", id="the gradient is NaN"),
        pytest.param(CALM, 4, 50, 9, 9.0, INF, "non_finite", id="a spike that is not finite is not a spike"),
        pytest.param(CALM, 4, 50, 9, 2.5, 1.0, None, id="at the least rise"),
        pytest.param(CALM, 4, 50, 9, 2.51, 1.0, "spike", id="above the least rise"),
        pytest.param(LIVELY, 6, 50, 9, 4.96, 1.0, None, id="within the deviations"),
        pytest.param(LIVELY, 6, 50, 9, 4.97, 1.0, "spike", id="beyond the deviations"),
        pytest.param(CALM, 4, 50, 9, -9.0, 1.0, None, id="a fall is no spike"),
        pytest.param(CALM, 4, 50, 9, 2.0, 1e30, None, id="a large gradient alone is no spike"),
        pytest.param(CALM, 5, 50, 9, 99.0, 1.0, None, id="the window lacks one"),
        pytest.param([], 4, 50, 9, 99.0, 1.0, None, id="the first batch of a phase"),
        pytest.param([], 4, 0, 9, NAN, 1.0, "non_finite", id="NaN in the first batch of all"),
        pytest.param(CALM, 4, 19, 9, 99.0, 1.0, None, id="the last token of the warmup"),
        pytest.param(CALM, 4, 20, 9, 99.0, 1.0, "spike", id="the warmup is over"),
        pytest.param(CALM, 4, 19, 9, 2.0, NAN, "non_finite", id="NaN within the warmup"),
        pytest.param(CALM, 4, 100, 9, 99.0, 1.0, "spike", id="the next phase has no warmup"),
        pytest.param(CALM, 4, 50, 0, 99.0, 0.0, None, id="no label in the batch"),
        pytest.param(CALM, 4, 50, 0, 0.0, NAN, "non_finite", id="no label and a NaN gradient"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_step(
    losses: list[float],
    window: int,
    tokens_before: int,
    predicted: int,
    loss: float,
    grad_norm: float,
    found: str | None,
) -> None:
    config = run_with(window)
    now = Clock.of(config).at(tokens_before)
    assert judge(config.stability, now, losses, predicted=predicted, loss=loss, grad_norm=grad_norm) == found


@pytest.mark.parametrize(
    ("action", "done", "damaged_weights", "reason"),
    [
        pytest.param("stop", 99, True, None, id="stop is done as it stands"),
        pytest.param("ignore", 99, True, None, id="ignore is done as it stands"),
        pytest.param("skip", 0, False, None, id="the first skip"),
        pytest.param("skip", 4, False, None, id="the last skip allowed"),
        pytest.param("skip", 5, False, "stability.max_skips=5 is reached", id="one skip too many"),
        pytest.param("skip", 6, False, "stability.max_skips=5 is reached", id="max_skips was lowered since"),
        pytest.param("skip", 0, True, "the weights themselves are not finite", id="skipping cannot mend weights"),
        pytest.param("roll_back", 0, True, None, id="rolling back mends weights"),
        pytest.param("roll_back", 1, False, None, id="the last roll back allowed"),
        pytest.param("roll_back", 2, False, "stability.max_roll_backs=2 is reached", id="one roll back too many"),
    ],
)
def test_when_the_configured_answer_cannot_be_given(
    action: str, done: int, damaged_weights: bool, reason: str | None
) -> None:
    settings = StabilityConfig(max_skips=5, max_roll_backs=2)
    found = why_stop(settings, action, done=done, damaged_weights=damaged_weights)
    assert found is None if reason is None else (found is not None and found.startswith(reason))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write checkpoints after steps 2, 5 and 8, of ten tokens each."""
    folder = tmp_path_factory.mktemp("saved")
    for step in (2, 5, 8):
        write(folder, step)
    return folder


def target_in(folder: Path, fault: str, step: int, distance: int = 0) -> int | None:
    """Return the step that a fault goes back to, in a run whose second phase begins at 85 tokens."""
    config = run_with(4, f"stability.spike_roll_back_batches={distance}", "phases.short.tokens=85")
    clock, tokens = Clock.of(config), 10 * (step - 1)
    found = find_target(config.stability, clock, folder, fault=fault, step=step, tokens_before=tokens)
    return None if found is None else found.step


@pytest.mark.runs
@pytest.mark.parametrize(
    ("fault", "distance", "step", "target"),
    [
        pytest.param("non_finite", 0, 8, 5, id="the newest before the step"),
        pytest.param("non_finite", 0, 6, 5, id="the one just before the step"),
        pytest.param("non_finite", 0, 5, 2, id="not the one of the step itself"),
        pytest.param("non_finite", 3, 6, 5, id="only spikes are gone back from further"),
        pytest.param("spike", 0, 6, 5, id="a spike, as near as can be"),
        pytest.param("spike", 2, 8, 5, id="a spike, exactly as far as configured"),
        pytest.param("spike", 3, 8, 2, id="a spike, at least as far as configured"),
        pytest.param("spike", 5, 8, 2, id="a spike, as far as the first"),
        pytest.param("spike", 6, 8, None, id="further than the first checkpoint"),
        pytest.param("spike", 100, 8, None, id="further than the run"),
        pytest.param("non_finite", 0, 2, None, id="before the first checkpoint"),
        pytest.param("non_finite", 0, 10, None, id="the newest is of the phase before"),
    ],
)
def test_which_checkpoint_is_gone_back_to(
    saved: Path, fault: str, distance: int, step: int, target: int | None
) -> None:
    """Another phase has other rows and rates: this phase would not have continued from its weights."""
    assert target_in(saved, fault, step, distance) == target


def test_without_a_folder_of_checkpoints_there_is_nothing_to_go_back_to(tmp_path: Path) -> None:
    assert target_in(tmp_path / "absent", "spike", step=5) is None


@pytest.mark.parametrize(
    ("name", "tokens_before", "target"),
    [
        pytest.param("step-00000005", 70, 5, id="it is there"),
        pytest.param("step-00000006", 70, 5, id="it is gone, the one before it is not"),
        pytest.param("step-00000001", 70, None, id="nothing as old is left"),
        pytest.param("step-00000005", 90, None, id="it is of the phase before"),
    ],
)
def test_a_second_life_goes_back_to_the_same(saved: Path, name: str, tokens_before: int, target: int | None) -> None:
    config = run_with(4, "phases.short.tokens=85")
    found = find_target_again(Clock.of(config), saved, name=name, tokens_before=tokens_before)
    assert (None if found is None else found.step) == target


@pytest.mark.runs
def test_a_damaged_checkpoint_is_passed_over_and_only_damaged_ones_are_an_error(tmp_path: Path) -> None:
    """Otherwise the error would be "there is no checkpoint", which is wrong."""
    for step in (2, 5):
        write(tmp_path, step)
    (tmp_path / "step-00000005" / STATE).write_text("torn")
    assert target_in(tmp_path, "non_finite", step=7) == 2
    (tmp_path / "step-00000002" / STATE).write_text("torn")
    with pytest.raises(StorageError, match="no checkpoint is whole"):
        target_in(tmp_path, "non_finite", step=7)


def test_spikes_let_through_hardly_raise_the_bar() -> None:
    """With mean and standard deviation ten of them would make the eleventh normal."""
    draw = random.Random(0)
    calm = [3 + draw.gauss(0, 0.05) for _ in range(128)]
    bar = highest_normal_loss(calm, 8.0, 0.1)
    assert 3.2 < bar < 3.7
    assert highest_normal_loss([*calm[10:], *[12.0] * 10], 8.0, 0.1) == pytest.approx(bar, abs=0.1)


@pytest.mark.runs
def test_noise_alone_is_not_a_spike() -> None:
    """Twenty thousand losses of a normal distribution, with the default of 8 deviations."""
    draw = random.Random(1)
    losses = [draw.gauss(2.0, 0.05) for _ in range(20_000)]
    found = sum(loss > highest_normal_loss(losses[i - 128 : i], 8.0, 0.0) for i, loss in enumerate(losses) if i >= 128)
    assert found == 0


def test_losses_of_the_phase_before_are_forgotten(tmp_path: Path) -> None:
    """Longer rows or another RoPE base change the level of the loss, and a healthy first step would be skipped."""
    config = RunConfig(name="a", runs_folder=str(tmp_path))
    folder = RunFolder(config)
    folder.path.mkdir(parents=True)
    parts: Any = SimpleNamespace()
    guard = Guard(config.stability, Clock.of(config), config.seed, parts, parts, parts, folder, parts, lambda: None)
    for phase, before, after in (
        ("short", [], []),
        ("short", [3.0, 2.0], [3.0, 2.0]),
        ("long", [3.0, 2.0], []),
        ("long", [1.0], [1.0]),
    ):
        guard.memory["losses"] = before
        guard.begin(phase)
        assert (guard.memory["phase"], guard.memory["losses"]) == (phase, after)
