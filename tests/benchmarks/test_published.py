"""The fit to others' runs, from which every predicted range comes, and the table that the page of results shows."""

from __future__ import annotations

import re

import numpy as np
import pytest

from benchmarks.published import FITTED, OTHERS, alone, fit, left_out
from modernbert_train.plan.speed import ERROR, PUBLISHED
from tests.support.paths import ROOT

FITTED_WITHIN = 0.15  # of a program like this one; where a run is left out of the fit, ERROR


@pytest.mark.slow
def test_the_pace_is_the_fit_and_the_table_has_its_errors() -> None:
    """A plan that changes moves the errors, and neither the ranges nor the table may keep the old ones."""
    runs = [*FITTED, *OTHERS]
    sums, rates = np.array([alone(run) for run in runs]), np.array([run.rate for run in runs])
    own = slice(len(FITTED))
    device, token = fit(sums[own], rates[own])
    assert device == pytest.approx(PUBLISHED.device, abs=0.005) and token == pytest.approx(PUBLISHED.token, abs=5e-9)
    errors = 1 / (PUBLISHED.device * sums + PUBLISHED.token) / rates - 1
    assert abs(errors[own]).max() < FITTED_WITHIN
    assert round(1 + abs(left_out(sums[own], rates[own])).max(), 2) == ERROR
    without = [f"{error:+.0%}" for error in left_out(sums[own], rates[own])] + ["not fitted"] * len(OTHERS)
    results = (ROOT / "benchmarks/RESULTS.md").read_text(encoding="utf-8")
    for run, alone_sum, error, last in zip(runs, sums, errors, without, strict=True):
        (row,) = re.findall(rf"^\| {re.escape(run.name)} \| .* k \|.*\|$", results, re.MULTILINE)
        published, predicted = (f"{rate / 1e3:,.0f} k" for rate in (run.rate, (1 + error) * run.rate))
        cells = [published, f"{1e-3 / alone_sum:,.0f} k", f"{1 / alone_sum / run.rate - 1:+.0%}", predicted]
        shown = [each.replace("%", " %") for each in (*cells, f"{error:+.0%}", last)]
        assert [cell.strip() for cell in row.split("|")[2:-1]] == shown, run.name


def test_the_fit_finds_the_pace_that_made_the_times() -> None:
    sums = [0.3e-6, 1e-6, 5e-6, 12e-6]
    rates = [1 / (1.2 * each + 0.5e-6) for each in sums]
    assert fit(sums, rates) == pytest.approx((1.2, 0.5e-6))
    assert left_out(sums, rates) == pytest.approx(np.zeros(4), abs=1e-9)
