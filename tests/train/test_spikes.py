"""The threshold of a spike, computed by hand. If it is too low, good text is skipped; too high, it is useless."""

from __future__ import annotations

import random

import pytest

from modernbert_train.train.spikes import highest_normal_loss


def test_median_and_deviation_by_hand() -> None:
    """Losses 1..9: median 5, distances 0 1 1 2 2 3 3 4 4 with median 2; 3 * 1.4826 * 2 above it."""
    assert highest_normal_loss([9, 1, 8, 2, 7, 3, 6, 4, 5], 3.0, 0.1) == pytest.approx(5 + 3 * 1.4826 * 2)


def test_even_losses_still_leave_room() -> None:
    """Large batches hardly vary: without a minimum rise any loss would be a spike."""
    assert highest_normal_loss([2.0] * 20, 8.0, 0.5) == 2.5


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
