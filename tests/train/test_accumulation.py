"""How the gradients of a step's microbatches and ranks are added up, looked at without starting ranks."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from modernbert_train.train import accumulation, composer_internals
from modernbert_train.train.accumulation import ReduceCopiesOnce
from modernbert_train.train.composer_internals import PlannedTrainer

MLM = {"mlm": 1.0}


def test_copies_are_summed_with_the_last_microbatch_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any earlier, and under HSDP what comes after it is only in one copy of the weights, which drift apart."""
    told: list[bool] = []

    class Sharded:
        set_requires_all_reduce = staticmethod(told.append)

    monkeypatch.setattr(accumulation, "FSDPModule", Sharded)
    monkeypatch.setattr(accumulation, "inner_model", lambda model: model)
    once: Any = ReduceCopiesOnce()
    for number in (3, 1, 2):
        state = SimpleNamespace(model=Sharded(), batch=SimpleNamespace(microbatches=(None,) * number))
        once.before_train_batch(state, None)
        for _ in range(number):
            once.before_backward(state, None)
    assert told == [False, False, True, True, False, True]


class Step:
    """A step of two microbatches on one of four ranks, of which each has the given number of predicted tokens."""

    def __init__(self, predicted: list[int]) -> None:
        self.calls: list[tuple[Any, float, bool]] = []
        device = SimpleNamespace(tensor_to_device=lambda tensor: tensor)
        plan = SimpleNamespace(objective=SimpleNamespace(terms=MLM))
        self.batch = SimpleNamespace(
            plan=plan, microbatches=tuple(SimpleNamespace(counts={"mlm": n}) for n in predicted)
        )
        self.state = SimpleNamespace(batch=self.batch, optimizers=[], device=device)
        self.engine = SimpleNamespace(run_event=lambda event: None)
        self._train_data_spec = SimpleNamespace(microbatch_transforms=lambda part: part)
        self._original_model = SimpleNamespace(divide_by=self._divide_by)
        self._divided_by: Mapping[str, float | Tensor] = {}

    def _divide_by(self, counts: Mapping[str, float | Tensor], terms: Mapping[str, float]) -> None:
        assert terms == MLM
        self._divided_by = counts

    def _means_over_ranks(self, counts: Mapping[str, int]) -> Mapping[str, float | Tensor]:
        return PlannedTrainer._means_over_ranks(self, counts)  # type: ignore[arg-type]

    def _train_microbatch(self, scaling: bool, weight: float, last: bool) -> None:
        assert weight == 1, "Composer's own weighing of microbatches"
        self.calls.append((self.state.batch, float(self._divided_by["mlm"]), last))


def test_gradients_are_of_the_mean_over_all_ranks_and_meet_with_the_last_microbatch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wrappers divide by the number of ranks, so the denominator is a mean; else the step depends on how many there
    are. DDP sums over the ranks with the microbatch that is called the last."""
    monkeypatch.setattr(composer_internals.dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(
        composer_internals.dist, "all_reduce", lambda total: total.add_(torch.tensor(100.0))
    )  # of the others
    step = Step([7, 13])
    PlannedTrainer._make_gradients(step, step.batch.microbatches)  # type: ignore[arg-type]
    first, second = step.batch.microbatches
    assert step.calls == [(first, 30.0, False), (second, 30.0, True)]
    assert step.state.batch is step.batch
