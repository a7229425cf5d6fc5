"""Rates and decay on the clock, worked by hand. If this breaks, a recipe trains with other rates than it states."""

from __future__ import annotations

from typing import Literal

import pytest

from modernbert_train.config.schema import ScheduleConfig
from modernbert_train.optim.schedules import lr_ratio_at

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
