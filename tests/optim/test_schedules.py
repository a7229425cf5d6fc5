"""Rates and decay on the clock, worked by hand. If this breaks, a recipe trains with other rates than it states."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from modernbert_train.clock import Clock
from modernbert_train.config.schema import PhaseConfig, RunConfig, ScheduleConfig, StableAdamWConfig
from modernbert_train.optim.schedules import lr_at, lr_ratio_at, max_lr_at, weight_decay_at

Decay = Literal["one_minus_sqrt", "linear", "cosine"]
# of a phase of 1,000 tokens, and the ratio at some of them: the end and the peak are exact
SCHEDULES: dict[str, tuple[ScheduleConfig, dict[int, float]]] = {
    # 0: never 0; then warmup, the joints at 100 and 600, and 1 - sqrt(0.25), sqrt(0.5625), sqrt(0.99)
    "trapezoid": (
        ScheduleConfig(warmup_tokens=100, decay_tokens=400, decay="one_minus_sqrt", final_lr_ratio=0.0),
        {
            0: 1e-10,
            25: 0.25,
            50: 0.5,
            100: 1,
            350: 1,
            600: 1,
            604: 0.9,
            700: 0.5,
            825: 0.25,
            996: 1 - 0.99**0.5,
            1000: 0,
        },
    ),
    "constant": (ScheduleConfig(), {0: 1, 1000: 1}),
    "no decay": (ScheduleConfig(warmup_tokens=100, final_lr_ratio=0.0), {100: 1, 999: 1, 1000: 1}),
    "warmup and decay meet": (
        ScheduleConfig(warmup_tokens=600, decay_tokens=400, decay="linear", final_lr_ratio=0.0),
        {599: 599 / 600, 600: 1, 601: 399 / 400},
    ),
    # for a run of unknown length: the rate falls slowly, and whenever a decay begins it begins there, without a jump
    "inverse square root": (
        ScheduleConfig(warmup_tokens=100, plateau="inverse_sqrt", decay_tokens=600, decay="linear", final_lr_ratio=0.1),
        {50: 0.5, 100: 1, 225: 2 / 3, 400: 0.5, 401: 0.5 - 0.4 / 600, 700: 0.3, 1000: 0.1},
    ),
    **{
        decay: (
            ScheduleConfig(decay_tokens=1000, decay=decay, final_lr_ratio=0.2),
            {0: 1, 250: 0.2 + 0.8 * quarter, 500: 0.2 + 0.8 * half, 1000: 0.2},
        )
        for decay, quarter, half in (
            ("one_minus_sqrt", 0.5, 1 - 0.5**0.5),
            ("linear", 0.75, 0.5),
            ("cosine", 0.5 + 0.125**0.5, 0.5),
        )
    },
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_ratio_is_that_worked_out_by_hand(name: str) -> None:
    schedule, ratios = SCHEDULES[name]
    found = {tokens: lr_ratio_at(schedule, 1000, tokens) for tokens in ratios}
    warmed = 2e-10 if schedule.warmup_tokens else 0.0  # the first rate is not 0
    assert found == pytest.approx(ratios, rel=1e-12, abs=warmed)
    assert all(found[tokens] == ratio for tokens, ratio in ratios.items() if tokens in (0, 1000) or ratio == 1)


@pytest.mark.parametrize("final", [0.0, 0.001, 0.1, 1 / 3])
@pytest.mark.parametrize("decay", ["one_minus_sqrt", "linear", "cosine"])
def test_the_end_is_exact_at_the_size_of_a_real_phase(decay: Decay, final: float) -> None:
    schedule = ScheduleConfig(decay_tokens=49_999_999_999, decay=decay, final_lr_ratio=final)
    assert lr_ratio_at(schedule, 50_000_000_001, 50_000_000_001) == final


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
