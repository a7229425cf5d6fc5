"""Communication of the ranks of a real training step, as recorded by torch's profiler."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from modernbert_train.train import session
from tests.support.ranks import train_each

Sizes = dict[str, list[int]]  # kind of collective -> numbers in the whole tensor, of each call


@dataclass(frozen=True)
class Counted:
    """One step of one rank.

    Attributes:
        sizes: of its collectives.
        microbatches: of the step on this rank.
        gradients: storages that its parameters' gradients lie in.
    """

    sizes: Sizes
    microbatches: int
    gradients: int


def collectives(record: Any) -> Sizes:
    """Every collective that a profile with shapes has recorded."""
    found: Sizes = {}
    reducing = False
    for event in record.events():
        shapes = event.input_shapes
        if event.name == "c10d::_allgather_base_":
            found.setdefault("all_gather", []).append(shapes[0][0])
        elif event.name == "c10d::_reduce_scatter_base_":
            found.setdefault("reduce_scatter", []).append(shapes[1][0])
        elif event.name == "gloo:all_reduce" and reducing:  # gloo makes a reduce-scatter of one too
            found.setdefault("all_reduce", []).append(math.prod(shapes[0]))
        reducing = event.name == "c10d::allreduce_" or (reducing and event.name != "gloo:all_reduce")
    return found


def count_steps(runs: list[list[str]], step: int) -> list[Counted]:
    """On every rank: train each run, and record everything from the end of the step before `step` to its own."""
    from composer import Callback, State
    from composer.loggers import Logger

    class Recorder(Callback):
        """Runs after every other callback of the run has done its work for a step."""

        def __init__(self) -> None:
            self.profile = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
            self.microbatches = self.gradients = 0

        def after_train_batch(self, state: State, logger: Logger) -> None:
            gradients = [parameter.grad for parameter in state.model.parameters()]
            local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients if grad is not None]
            self.gradients = len({grad.untyped_storage().data_ptr() for grad in local})

        def batch_end(self, state: State, logger: Logger) -> None:
            if state.timestamp.batch.value == step - 1:
                self.profile.start()
            elif state.timestamp.batch.value == step:
                self.profile.stop()
                self.microbatches = len(state.batch.microbatches)

    recorders: list[Recorder] = []

    def record(*_: Any) -> list[Recorder]:
        recorders.append(Recorder())
        return recorders[-1:]

    with patch.object(session, "build_callbacks", record):
        train_each(runs, of_meshes=False)
    return [Counted(collectives(each.profile), each.microbatches, each.gradients) for each in recorders]
