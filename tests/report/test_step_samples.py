"""Sampling of steps for the page: if a spike is left out, a fault becomes invisible."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modernbert_train.report.step_samples import StepRecord, Steps, as_json, means, thin


def steps_of(losses: list[float]) -> Steps:
    return Steps(StepRecord(i, "stable", 100.0 * i, loss=loss) for i, loss in enumerate(losses, 1))


def test_steps_are_records_in_columns() -> None:
    steps = steps_of([3.0, 2.0, 1.0])
    steps.append(StepRecord(4, "decay", 400.0, loss=0.5), {"loss/mlm": 0.25})
    assert len(steps) == 4 and steps[-1].loss == 0.5 and [s.step for s in steps[1:3]] == [2, 3]
    assert steps.ranges() == [("stable", 0, 3), ("decay", 3, 4)]
    assert steps.terms == ("loss/mlm",) and math.isnan(steps.column("loss/mlm")[0])
    steps.pop()
    assert len(steps) == 3 and steps.dropped == 1 and len(steps.column("loss/mlm")) == 3


@pytest.mark.runs
@given(st.lists(st.floats(-1e6, 1e6), min_size=60, max_size=400), st.integers(30, 60))
def test_thinning_keeps_both_ends_and_both_extremes(losses: list[float], points: int) -> None:
    chosen = thin(steps_of(losses), points).tolist()
    assert chosen == sorted(set(chosen)) and {0, len(losses) - 1} <= set(chosen)
    assert max(losses[i] for i in chosen) == max(losses) and min(losses[i] for i in chosen) == min(losses)
    assert len(chosen) <= points + 12 or len(losses) <= points


def test_thinning_keeps_a_gap_and_the_first_step_of_a_phase() -> None:
    losses = [1.0] * 5000
    losses[2500] = math.nan
    steps = steps_of(losses)
    steps.append(StepRecord(5001, "decay", 500_100.0, loss=1.0))
    steps.append(StepRecord(5002, "decay", 500_200.0, loss=1.0))
    chosen = thin(steps, 500)
    assert {2500, 5000} <= set(chosen.tolist()) and len(chosen) < 510


def test_the_mean_of_what_is_drawn_is_the_mean_of_all() -> None:
    """Extremes only would draw a smoothed curve through their middle."""
    values = np.array([1.0, 1.0, 9.0, 1.0, np.nan, 2.0, 4.0])
    chosen = np.array([0, 2, 5, 6])
    assert means(values, chosen).tolist() == [1.0, 5.0, 1.5, 4.0]


def test_numbers_are_short_and_whole_numbers_whole() -> None:
    assert as_json(np.array([1.23456789, 1e-9 / 3, 0.0, -2.5])) == [1.23457, 3.33333e-10, 0.0, -2.5]
    assert as_json(np.array([123_456_789.0, 2.0]), 16) == [123_456_789, 2]
    assert as_json(np.array([math.nan, math.inf, 1.0])) == [None, None, 1]
    assert all(math.isfinite(value or 0) for value in as_json(np.array([1e300, -1e-300, 5e-324])))
