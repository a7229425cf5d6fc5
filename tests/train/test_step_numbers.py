"""The sums of a step over ranks, and their readers."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest

from modernbert_train.distributed.save_requests import SaveRequest
from modernbert_train.train.step_numbers import StepNumbers

TRAIN = Path(__file__).parents[2] / "modernbert_train/train"
MLM = {"mlm": 1.0}
READERS = ("stability", "recorder", "checkpointing")


def test_one_rank_that_asks_is_enough_and_nobody_is_not() -> None:
    """Slurm may signal one machine only. If the others' signals were needed, the job would be killed unsaved."""
    requests = [
        StepNumbers.of(MLM, [1.0], [1.0], 1.0, *given).requests for given in ((1.0, 0.0), (0.0, 1.0), (0.0, 0.0))
    ]
    assert requests == [SaveRequest(stop=True), SaveRequest(overdue=True), SaveRequest()]


def test_a_loss_of_several_terms_is_of_their_means() -> None:
    """Each term is divided by its count, once, and weighted; guard and metrics read the same value."""
    terms = {"mlm": 1.0, "nsp": 0.5}
    numbers = StepNumbers.of(terms, [30.0, 8.0], [12.0, 4.0], 9.0, 0.0, 0.0)
    assert numbers.losses == {"mlm": 2.5, "nsp": 2.0} and numbers.counts == {"mlm": 12, "nsp": 4}
    assert (numbers.loss, numbers.grad_norm, numbers.predicted) == (3.5, 3.0, 12)
    assert StepNumbers.of(terms, [30.0, 0.0], [12.0, 0.0], 9.0, 0.0, 0.0).loss == 2.5, "a term without a label"
    assert StepNumbers.of(MLM, [0.0], [0.0], 0.0, 0.0, 0.0).loss == 0, "without a label"


@pytest.mark.parametrize("sums", [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)])
def test_what_is_not_finite_is_reported(sums: tuple[float, float]) -> None:
    total, squared_gradient = sums
    numbers = StepNumbers.of(MLM, [total], [4.0], squared_gradient, 0.0, 0.0)
    assert not (math.isfinite(numbers.loss) and math.isfinite(numbers.grad_norm))


@pytest.mark.parametrize("reader", READERS)
def test_guard_recorder_and_saver_do_not_know_each_other(reader: str) -> None:
    tree = ast.parse((TRAIN / f"{reader}.py").read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported.isdisjoint(f"modernbert_train.train.{other}" for other in READERS if other != reader)
