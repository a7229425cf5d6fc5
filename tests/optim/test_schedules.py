"""Rates and decay on the clock, worked by hand. If this breaks, a recipe trains with other rates than it states."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import pytest

from modernbert_train.clock import Clock
from modernbert_train.config.schema import PhaseConfig, RunConfig, ScheduleConfig, StableAdamWConfig
from modernbert_train.optim.schedules import lr_at, lr_ratio_at, max_lr_at, weight_decay_at

Decay = Literal["one_minus_sqrt", "linear", "cosine"]
TRAPEZOID = ScheduleConfig(warmup_tokens=100, decay_tokens=400, decay="one_minus_sqrt", final_lr_ratio=0.0)


@pytest.mark.parametrize(
    ("tokens", "ratio"),
    [
        (0, 1e-10),  # never 0
        (25, 0.25),
        (50, 0.5),
        (100, 1.0),  # joint: warmup to constant
        (350, 1.0),
        (600, 1.0),  # joint: constant to decay
        (604, 0.9),  # 1 - sqrt(0.01)
        (700, 0.5),  # 1 - sqrt(0.25)
        (825, 0.25),  # 1 - sqrt(0.5625)
        (996, 1 - math.sqrt(0.99)),
        (1000, 0.0),
    ],
)
def test_trapezoid(tokens: int, ratio: float) -> None:
    assert lr_ratio_at(TRAPEZOID, 1000, tokens) == pytest.approx(ratio, abs=2e-10)


def test_the_first_rate_is_small_but_not_zero() -> None:
    assert lr_ratio_at(TRAPEZOID, 1000, 0) == 1e-10
    assert lr_ratio_at(ScheduleConfig(), 1000, 0) == 1.0


def test_an_inverse_square_root_cools_down_from_where_it_stands() -> None:
    """A run of unknown length: the rate falls slowly, and whenever a decay begins it begins there, without a jump."""
    schedule = ScheduleConfig(
        warmup_tokens=100, plateau="inverse_sqrt", decay_tokens=600, decay="linear", final_lr_ratio=0.1
    )
    rates = {tokens: lr_ratio_at(schedule, 1000, tokens) for tokens in (50, 100, 225, 400, 401, 700, 1000)}
    assert rates == pytest.approx(
        {50: 0.5, 100: 1.0, 225: 2 / 3, 400: 0.5, 401: 0.5 - 0.4 / 600, 700: 0.3, 1000: 0.1}, abs=1e-9
    )


@pytest.mark.parametrize(
    ("decay", "quarter", "half"),
    [
        ("one_minus_sqrt", 0.2 + 0.8 * 0.5, 0.2 + 0.8 * 0.2928932188134524),
        ("linear", 0.8, 0.6),
        ("cosine", 0.2 + 0.8 * 0.8535533905932737, 0.6),
    ],
)
def test_each_decay_starts_at_one_and_ends_exactly_at_the_final_ratio(
    decay: Decay, quarter: float, half: float
) -> None:
    schedule = ScheduleConfig(decay_tokens=1000, decay=decay, final_lr_ratio=0.2)
    assert lr_ratio_at(schedule, 1000, 0) == 1.0
    assert lr_ratio_at(schedule, 1000, 250) == pytest.approx(quarter, rel=1e-12)
    assert lr_ratio_at(schedule, 1000, 500) == pytest.approx(half, rel=1e-12)
    assert lr_ratio_at(schedule, 1000, 1000) == 0.2


@pytest.mark.parametrize("final", [0.0, 0.001, 0.1, 1 / 3])
@pytest.mark.parametrize("decay", ["one_minus_sqrt", "linear", "cosine"])
def test_the_end_is_exact_at_the_size_of_a_real_phase(decay: Decay, final: float) -> None:
    schedule = ScheduleConfig(decay_tokens=49_999_999_999, decay=decay, final_lr_ratio=final)
    assert lr_ratio_at(schedule, 50_000_000_001, 50_000_000_001) == final


def test_without_decay_the_rate_stays_at_the_peak_to_the_end() -> None:
    schedule = ScheduleConfig(warmup_tokens=100, final_lr_ratio=0.0)
    assert [lr_ratio_at(schedule, 1000, tokens) for tokens in (100, 999, 1000)] == [1.0, 1.0, 1.0]


def test_warmup_and_decay_may_meet() -> None:
    schedule = ScheduleConfig(warmup_tokens=600, decay_tokens=400, decay="linear")
    assert lr_ratio_at(schedule, 1000, 600) == 1.0
    assert lr_ratio_at(schedule, 1000, 599) < 1.0 and lr_ratio_at(schedule, 1000, 601) < 1.0


def make_run() -> RunConfig:
    """Three phases of the base recipe in miniature: warmup and constant, constant at 3/8, decay from 3/8."""
    phase = PhaseConfig(tokens=1000, row_tokens=16, batch_rows=4, microbatch_tokens=64)
    return RunConfig(
        optim=StableAdamWConfig(lr=8e-4, weight_decay=1e-5),
        phases={
            "stable": replace(phase, schedule=ScheduleConfig(warmup_tokens=100)),
            "context": replace(phase, tokens=200, lr_ratio=0.375, optim={"weight_decay": 2e-5}),
            "decay": replace(
                phase,
                tokens=400,
                lr_ratio=0.375,
                optim={"weight_decay": 0.0},
                schedule=ScheduleConfig(decay_tokens=400, final_lr_ratio=0.001),
            ),
        },
    )


@pytest.mark.parametrize(
    ("tokens", "lr", "max_lr", "decay"),
    [
        (0, 8e-14, 8e-4, 1e-5),
        (50, 4e-4, 8e-4, 1e-5),
        (100, 8e-4, 8e-4, 1e-5),
        (999, 8e-4, 8e-4, 1e-5),
        (1000, 3e-4, 3e-4, 2e-5),
        (1199, 3e-4, 3e-4, 2e-5),
        (1200, 3e-4, 3e-4, 0.0),  # a phase's 0 is a choice, not an absence
        (1300, 3e-4 * (0.001 + 0.999 * 0.5), 3e-4, 0.0),
        (1600, 3e-7, 3e-4, 0.0),
        (5000, 3e-7, 3e-4, 0.0),
    ],
)
def test_rates_over_phases(tokens: int, lr: float, max_lr: float, decay: float) -> None:
    config = make_run()
    assert lr_at(Clock.of(config), tokens) == pytest.approx(lr, rel=1e-8)
    assert max_lr_at(Clock.of(config), tokens) == pytest.approx(max_lr, rel=1e-12)
    assert weight_decay_at(Clock.of(config), tokens) == decay
