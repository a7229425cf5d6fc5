"""Requests for an extra checkpoint: their source, whether they still count, and for how long."""

from __future__ import annotations

import pytest

from modernbert_train.distributed import save_requests
from modernbert_train.distributed.save_requests import Requests


class Clock:
    now = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(save_requests.time, "monotonic", lambda: clock.now)
    return clock


def test_a_checkpoint_is_overdue_once_in_each_interval(clock: Clock) -> None:
    """Not before, and not in every step after the first interval, which would write checkpoints instead of training."""
    asked = Requests(60.0)
    for _ in range(3):
        clock.now += 59
        assert not asked.of_this_rank().overdue
        clock.now += 1
        assert asked.of_this_rank().overdue
        asked.saved()
        assert not asked.of_this_rank().overdue
    clock.now += 1e9
    assert not Requests(None).of_this_rank().overdue
