"""Idle workers: a validation or an evaluation may take longer than a batch ever should."""

from __future__ import annotations

import inspect
from contextlib import closing
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from modernbert_train.data.workers import LOOK_SECONDS, deliveries


class Numbers(Dataset[Any]):
    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 4


@pytest.mark.runs
def test_the_watch_waits_for_nobody_between_two_batches() -> None:
    """With a deadline left over it would kill healthy workers in the middle of a long evaluation."""
    loader = DataLoader(Numbers(), batch_size=None, num_workers=1, timeout=LOOK_SECONDS)
    with closing(deliveries(loader, timeout_seconds=60.0)) as batches:
        assert next(batches) == 0
        watch = inspect.getgeneratorlocals(batches)["watch"]  # type: ignore[arg-type]
        assert watch.deadline is None
        assert next(batches) == 1 and watch.deadline is None and not watch.over
