"""Dropout of a step is keyed by the step. With one key for all steps the same neurons would always be dropped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from modernbert_train.batch import Batch, Packed, Sums
from modernbert_train.distributed.compute import Compute
from modernbert_train.train.gradients import gradients


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
    nothing = torch.zeros(0, dtype=torch.int64)
    part = Batch(Packed(nothing, nothing, nothing, 1), {}, {"mlm": 1}, num_rows=1)
    plan = SimpleNamespace(objective=SimpleNamespace(terms={"mlm": 1.0}, compares=False))
    batch: Any = SimpleNamespace(plan=plan, microbatches=(part,) * microbatches)
    model = Dropped().train()
    gradients(model, batch, Compute(torch.device("cpu"), "fp32"), seed, steps)
    return [left.detach() for left in model.left]


def test_every_step_and_microbatch_drops_others_and_the_same_again_when_repeated() -> None:
    found = [mask for steps in range(3) for mask in drawn(5, steps)] + drawn(6, 0)
    for first in range(len(found)):
        for second in range(first):
            assert not torch.equal(found[first], found[second]), (first, second)
    for mask, again in zip(drawn(5, 1), found[2:4], strict=True):
        assert torch.equal(mask, again)
