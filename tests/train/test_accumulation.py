"""Gradients over a step's microbatches and ranks, and the keys of its dropout, tested without starting ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modernbert_train.batch import Batch, Packed, Sums
from modernbert_train.distributed.compute import Compute
from modernbert_train.train import gradients as making
from modernbert_train.train.gradients import gradients

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


def test_ranks_meet_with_the_last_microbatch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP all-reduces bucket by bucket during backward; doing so in each microbatch would multiply the traffic."""
    meets: list[bool] = []

    class Noting(Root):
        def no_sync(self) -> Any:
            meets[-1] = False
            return torch.enable_grad()

    monkeypatch.setattr(making, "DistributedDataParallel", Noting)
    model = Noting([])

    def passed(event: str, part: Batch, value: Any, last: bool) -> None:
        if event == "after_backward":
            meets.append(True)

    meets.append(True)
    gradients(model, step_of([1, 2, 3]), Compute(CPU, "fp32"), 0, 0, passed)
    assert meets[:-1] == [False, False, True]


class Dropped(nn.Module):
    """Its loss is dropout applied to ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.left = nn.Parameter(torch.ones(64)), list[Tensor]()

    def forward(self, batch: Batch, figures: bool = False) -> Sums:
        self.left.append(nn.functional.dropout(self.weight, 0.5))
        return Sums({"mlm": self.left[-1].sum()}, {})


def drawn(seed: int, steps: int, microbatches: int = 2) -> list[Tensor]:
    """Return the microbatches' dropout in the step after `steps`, in a process that drew other numbers before."""
    torch.rand(steps + 7)
    model = Dropped().train()
    gradients(model, step_of([1] * microbatches), Compute(CPU, "fp32"), seed, steps)
    return [left.detach() for left in model.left]


def test_every_step_and_microbatch_drops_others_and_the_same_again_when_repeated() -> None:
    """With one key for all steps the same neurons would always be dropped."""
    found = [mask for steps in range(3) for mask in drawn(5, steps)] + drawn(6, 0)
    for first in range(len(found)):
        for second in range(first):
            assert not torch.equal(found[first], found[second]), (first, second)
    for mask, again in zip(drawn(5, 1), found[2:4], strict=True):
        assert torch.equal(mask, again)
