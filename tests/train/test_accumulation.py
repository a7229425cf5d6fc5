"""Accumulation of gradients over a step's microbatches and ranks, tested without starting ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from modernbert_train.batch import Batch, Packed, Sums
from modernbert_train.distributed.compute import Compute
from modernbert_train.train import gradients as making
from modernbert_train.train.gradients import counts_per_rank, gradients

CPU = torch.device("cpu")


def step_of(predicted: list[int]) -> Any:
    """A step on one rank whose microbatches have the given number of predicted tokens."""
    nothing = torch.zeros(0, dtype=torch.int64)
    parts = [Batch(Packed(nothing, nothing, nothing, 1), {}, {"mlm": count}, num_rows=1) for count in predicted]
    return SimpleNamespace(
        plan=SimpleNamespace(objective=SimpleNamespace(terms={"mlm": 1.0}, compares=False)), microbatches=tuple(parts)
    )


class Root(nn.Module):
    """Stands for the root of a module that FSDP2 has sharded; its setting applies to all modules below."""

    def __init__(self, told: list[bool]) -> None:
        super().__init__()
        self.weight, self.told = nn.Parameter(torch.ones(())), told

    def set_requires_all_reduce(self, value: bool) -> None:
        self.told.append(value)

    def forward(self, batch: Batch) -> Sums:
        return Sums({"mlm": self.weight * batch.counts["mlm"]}, {})


def test_copies_are_summed_with_the_last_microbatch_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it happened earlier, under HSDP later gradients would exist in one replica only, and replicas drift apart."""
    told: list[bool] = []
    monkeypatch.setattr(making, "FSDPModule", Root)
    model = nn.Sequential(Root(told))
    for number in (3, 1, 2):
        gradients(model, step_of([4] * number), Compute(CPU, "fp32"), 0, 0)
    assert told == [False, False, True, True, False, True]


def test_gradients_are_of_the_mean_over_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrappers divide by the number of ranks, so the denominator is a mean; otherwise the step depends on the number of
    ranks."""
    monkeypatch.setattr(making, "num_ranks", lambda: 4)
    monkeypatch.setattr(making, "sum_over_ranks", lambda totals: totals.add_(torch.tensor(100.0)))  # other ranks' sums
    assert float(counts_per_rank({"mlm": 7 + 13}, CPU)["mlm"]) == 30.0
    model = Root([])
    gradients(model, step_of([7, 13]), Compute(CPU, "fp32"), 0, 0)
    assert model.weight.grad is not None and float(model.weight.grad) == pytest.approx((7 + 13) / 30)


def test_ranks_meet_with_the_last_microbatch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP all-reduces bucket by bucket during backward; doing so in each microbatch would multiply the traffic."""
    meets: list[bool] = []

    class Wrapped(Root):
        def no_sync(self) -> Any:
            meets[-1] = False
            return torch.enable_grad()

    class Noting(Wrapped):
        def forward(self, batch: Batch) -> Sums:
            return super().forward(batch)

    monkeypatch.setattr(making, "DistributedDataParallel", Noting)
    model = Noting([])

    def passed(event: str, part: Batch, value: Any, last: bool) -> None:
        if event == "after_backward":
            meets.append(True)

    meets.append(True)
    gradients(model, step_of([1, 2, 3]), Compute(CPU, "fp32"), 0, 0, passed)
    assert meets[:-1] == [False, False, True]
