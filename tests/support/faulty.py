"""Planted faults: at one step, on one rank, in one microbatch, a layer outputs NaN (either pass), or a loss jumps.

They act on the trainer from outside, so the product knows nothing about tests. A fault recurs when the step is computed
again, like a bad document's; with `once` it does not, like a bad memory cell's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
from composer.utils import dist
from torch import Tensor

from modernbert_train.__main__ import read_run
from modernbert_train.data.facts import read_facts
from modernbert_train.models.layers import GeGLU
from modernbert_train.train.adapters import ComposerObjective
from modernbert_train.train.build_trainer import build_data
from modernbert_train.train.checkpointing import Checkpoints
from modernbert_train.train.step import Loop

LAYER = 2  # the layer whose mlp is faulty
POSITION = 1  # the faulty token: in the first document of the microbatch


@dataclass
class Fault:
    """A fault and its time; `steps` count from 1."""

    kind: Literal["forward", "backward", "spike"]
    steps: tuple[int, ...]
    microbatch: int = 0
    rank: int = 0
    once: bool = False


class Killed(BaseException):
    """Simulates a killed process: nothing between the step and the end of the run catches it."""


class _NanBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor) -> Tensor:
        return x_TD.clone()

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> Tensor:
        grad_TD = grad_TD.clone()
        grad_TD[POSITION] = math.nan
        return grad_TD


@contextmanager
def at_fault(*faults: Fault, kill_at: int | None = None) -> Iterator[None]:
    """Plant faults in the runs of this context; kill them at the end of step `kill_at`, before it is saved."""
    step = forwards = microbatches = mlps = 0
    active: Fault | None = None
    spent: set[tuple[int, int]] = set()
    real_start, real_end = Loop.set_clock, Checkpoints.after_step
    real_forward, real_mlp = ComposerObjective.forward, GeGLU.forward

    def set_clock(self: Loop, plan: Any) -> None:
        nonlocal step, forwards, microbatches
        step, forwards, microbatches = self.state.timestamp.batch.value + 1, 0, len(self.state.batch.microbatches)
        real_start(self, plan)

    def after_step(self: Checkpoints, *given: Any, **named: Any) -> bool:
        if step == kill_at:
            raise Killed
        return real_end(self, *given, **named)

    def forward(self: ComposerObjective, batch: Any, figures: bool = False) -> Any:
        nonlocal forwards, mlps, active
        number, active, mlps = forwards % microbatches, None, 0
        forwards += 1
        for index, fault in enumerate(faults):
            here = step in fault.steps and number == fault.microbatch and dist.get_global_rank() == fault.rank
            if here and not (fault.once and (index, step) in spent):
                active = fault
                spent.add((index, step))
        found = real_forward(self, batch, figures)
        if active is not None and active.kind == "spike":
            return found._replace(losses={term: total * 10 for term, total in found.losses.items()})
        return found

    def mlp(self: GeGLU, x_TD: Tensor) -> Tensor:
        nonlocal mlps
        out_TD = real_mlp(self, x_TD)
        if mlps == LAYER and active is not None and active.kind == "forward":
            out_TD = out_TD.clone()
            out_TD[POSITION] = math.nan
        if mlps == LAYER and active is not None and active.kind == "backward":
            out_TD = _NanBackward.apply(out_TD)
        mlps += 1
        return out_TD

    with (
        patch.object(Loop, "set_clock", set_clock),
        patch.object(Checkpoints, "after_step", after_step),
        patch.object(ComposerObjective, "forward", forward),
        patch.object(GeGLU, "forward", mlp),
    ):
        yield


def first_document(words: list[str], step: int, microbatch: int, rank: int = 0, num_ranks: int = 1) -> dict[str, Any]:
    """Return the first chunk of a rank's microbatch, from the plan only."""
    config = read_run(words)
    plans = build_data(config, read_facts(config.data)).loader(rank, num_ranks).plans()
    for _ in range(step):
        rows, plan = next(plans)
    return rows[microbatch * plan.microbatch_rows][0]._asdict() | {"stream": "train"}
