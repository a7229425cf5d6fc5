"""Batches without one label, and ranks without one among others that have some: a step like any other, on any ranks.

If this breaks, a run with a low masking rate or short documents dies in a division, or trains on NaN, at a step that
nobody can foretell, and differently on every number of ranks.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from modernbert_train.__main__ import main, read_run
from modernbert_train.train import build
from modernbert_train.train.checkpoint import newest_valid
from tests.conftest import TinyRun
from tests.distributed.gloo import run_ranks
from tests.distributed.test_train_ranks import records, weights

# one label in a batch of 500 tokens, on average
FEW = (
    "phases.long=null",
    "phases.short.batch_warmup=null",
    "phases.short.tokens=5000",
    "objective.mask_rate=0.002",
    "data.num_workers=0",
)


def train_all(runs: list[list[str]]) -> None:
    """On one rank: every run, one after the other."""
    build.joined = lambda *_: nullcontext()  # the test's own process group
    for words in runs:
        build.train(read_run(words))


def told(capsys: pytest.CaptureFixture[str]) -> int:
    return "".join(capsys.readouterr()).count("not one token of its batch is predicted")


@pytest.mark.timeout(120)
def test_a_batch_without_a_label_is_a_step_of_loss_zero_on_any_number_of_ranks(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *tiny_run(*FEW, "name=one")]) == 0
    assert told(capsys) == 1, "said once"
    one = records(tmp_path / "runs/one")
    without = [entry["step"] for entry in one if entry["predicted"] == 0]
    assert len(without) > 2 and any(entry["predicted"] == 1 for entry in one), "a run that shows both"
    for entry in one:
        assert (entry["loss"] == 0) == (entry["grad_norm"] == 0) == (entry["step"] in without)

    strategies = {name: f"distributed.strategy={name}" for name in ("ddp", "fsdp2")}
    run_ranks(train_all, 2, [tiny_run(*FEW, f"name={name}", word) for name, word in strategies.items()])
    for name in strategies:
        other = records(tmp_path / "runs" / name)
        assert [entry["predicted"] for entry in other] == [entry["predicted"] for entry in one]
        for mine, theirs in zip(other, one, strict=True):
            for key in ("loss", "grad_norm", "update_norm"):
                assert mine[key] == pytest.approx(theirs[key], rel=2e-4, abs=1e-6), (name, mine["step"], key)
        for parameter, tensor in weights(tmp_path / "runs" / name).items():
            torch.testing.assert_close(tensor, weights(tmp_path / "runs/one")[parameter], rtol=2e-3, atol=2e-5)


def test_the_count_goes_on_where_the_run_does_and_a_loss_of_zero_is_not_compared_with(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A loss of 0 among those that the guard compares with would make the next real one a spike."""
    words = tiny_run(*FEW, "checkpoint.interval_steps=3")

    def guard() -> Any:
        found, _ = newest_valid(tmp_path / "runs/tiny/checkpoints")
        assert found is not None and found.state.training is not None
        return found.state.training.stability

    assert main(["train", *words, "phases.short.tokens=2500"]) == 0
    first = guard()["unlabelled_steps"]
    assert main(["train", *words]) == 0
    lines = records(tmp_path / "runs/tiny")
    assert 0 < first < guard()["unlabelled_steps"] == sum(entry["predicted"] == 0 for entry in lines)
    assert told(capsys) == 1
    assert 0.0 not in guard()["losses"]
