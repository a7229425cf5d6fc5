"""A loss of several terms: each is divided once, by its count in the global batch, however the batch is cut.

If this breaks, a term's weight depends on memory or the number of GPUs, and the printed loss does not match the
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from modernbert_train.__main__ import main
from modernbert_train.batch import Batch, Packed, Sums, weighted
from modernbert_train.distributed.compute import Compute
from modernbert_train.train import gradients as making
from modernbert_train.train.gradients import gradients
from tests.support.make_shards import make_documents, make_shards
from tests.support.runs import records
from tests.support.tiny_run import TinyRun

TERMS = {"mlm": 1.0, "sop": 0.5}
# inputs of the two terms in each row: as many tokens as listed, pairs in some rows, and one empty row
TOKENS = [[1.0, 2.0, 3.0], [4.0], [], [5.0, 6.0], [7.0, 8.0, 9.0, 10.0], [11.0]]
PAIRS = [[1.0], [], [], [2.0, -4.0], [], [3.0]]


class TwoTerms(nn.Module):
    """Sums of a weight times the rows' numbers; the gradients are the sums of these numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, batch: Batch, figures: bool = False) -> Sums:
        sums = {name: (self.weight[n] * batch.targets[name]).sum() for n, name in enumerate(TERMS)}
        return Sums(sums, {})


def microbatch(rows: Sequence[int]) -> Batch:
    targets = {
        name: torch.tensor([number for row in rows for number in of_rows[row]])
        for name, of_rows in (("mlm", TOKENS), ("sop", PAIRS))
    }
    nothing = torch.zeros(0, dtype=torch.int64)
    counts = {name: len(numbers) for name, numbers in targets.items()}
    return Batch(Packed(nothing, nothing, nothing, 1), targets, counts, num_rows=len(rows))


def step(cut: Sequence[Sequence[int]]) -> tuple[float, list[float]]:
    """Return the contributions of a rank with these microbatches to the loss and to the gradient."""
    model, losses = TwoTerms(), list[float]()

    def passed(event: str, part: Batch, value: Any, last: bool) -> None:
        if event == "after_loss":
            losses.append(float(value.detach()))

    plan = SimpleNamespace(objective=SimpleNamespace(terms=TERMS, compares=False))
    batch: Any = SimpleNamespace(plan=plan, microbatches=tuple(map(microbatch, cut)))
    gradients(model, batch, Compute(torch.device("cpu"), "fp32"), 0, 0, passed)
    return sum(losses), [0.0, 0.0] if model.weight.grad is None else model.weight.grad.tolist()


def flat(numbers: list[list[float]]) -> list[float]:
    return [number for row in numbers for number in row]


MEANS = [sum(flat(numbers)) / len(flat(numbers)) for numbers in (TOKENS, PAIRS)]
LOSS, GRADIENT = MEANS[0] + 0.5 * MEANS[1], [MEANS[0], 0.5 * MEANS[1]]
CUTS: list[list[list[int]]] = [
    [[0, 1, 2, 3, 4, 5]],
    [[0, 1], [2, 3], [4, 5]],
    [[0], [1, 2, 3, 4], [5]],
    [[2], [0, 1], [3, 4, 5]],
    [[number] for number in range(6)],
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_each_term_is_divided_once_by_its_count_whatever_the_cut(cut: list[list[int]]) -> None:
    loss, gradient = step(cut)
    assert loss == pytest.approx(LOSS) and gradient == pytest.approx(GRADIENT)


@pytest.mark.parametrize("ranks", [[[[0, 1, 2]], [[3, 4, 5]]], [[[0], [1]], [[2, 3], [4, 5]]], [[[2], [1]], CUTS[1]]])
def test_ranks_make_the_same_step(monkeypatch: pytest.MonkeyPatch, ranks: list[list[list[int]]]) -> None:
    """Wrappers average gradients over ranks; a rank may lack a term, or all of them."""
    numbers = [row for cut in ranks for part in cut for row in part]
    of_terms = [flat([of_rows[row] for row in numbers]) for of_rows in (TOKENS, PAIRS)]
    monkeypatch.setattr(making, "num_ranks", lambda: len(ranks))
    monkeypatch.setattr(making, "sum_over_ranks", lambda counts: counts.copy_(torch.tensor([*map(len, of_terms)])))
    found = [step(cut) for cut in ranks]
    means = [sum(of_term) / len(of_term) for of_term in of_terms]
    assert sum(loss for loss, _ in found) / len(ranks) == pytest.approx(means[0] + 0.5 * means[1])
    gradient = torch.tensor([grad for _, grad in found]).mean(0).tolist()
    assert gradient == pytest.approx([means[0], 0.5 * means[1]])


@pytest.mark.runs
def test_texts_too_short_for_pairs_train_their_masked_tokens(tiny_run: TinyRun, tmp_path: Path) -> None:
    """In batches without a pair the loss of the sentence order is 0 and not 0/0, in training and on held-out text."""
    file, *_ = tiny_run()
    run = yaml.safe_load(Path(file).read_text())
    for name, seed in (("train", 21), ("validation", 22)):
        tokenizer = Path(run["data"]["tokenizer"])
        make_shards(tmp_path / name, make_documents(tokenizer, [1] * 300, seed=seed), tokenizer)
        run["data"][name] = str(tmp_path / name)
    run["objective"] = {"name": "sop", "mask_rate": 0.5}
    Path(file).write_text(yaml.safe_dump(run, sort_keys=False))
    assert main(["train", file, "phases.long=null", "phases.short={tokens: 900, schedule: {warmup_tokens: 0}}"]) == 0
    steps = records(tmp_path / "runs/tiny")
    assert steps and all((step["count/sop"], step["loss/sop"]) == (0, 0.0) for step in steps)
    assert all(step["count/mlm"] == step["predicted"] and math.isfinite(step["grad_norm"]) for step in steps)
    assert sum(step["predicted"] for step in steps) > 0
    (measured, *_) = records(tmp_path / "runs/tiny", "validation")
    assert (measured["sop/loss"], measured["sop/accuracy"]) == (0.0, 0.0)


def test_terms_that_were_not_requested_do_not_count() -> None:
    """Other values that a module computes, for its metrics, are not trained."""
    sums: dict[str, Any] = {"mlm": torch.tensor(6.0), "sop": torch.tensor(8.0), "other": torch.tensor(100.0)}
    assert float(weighted(sums, TERMS, {"mlm": 3.0, "sop": 4.0})) == 6 / 3 + 0.5 * 8 / 4
    assert float(weighted(sums, {"mlm": 1.0}, {"mlm": 3.0})) == 2.0
