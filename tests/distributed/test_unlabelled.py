"""Batches without one label, and ranks without one among others that have some: a step like any other, on any ranks.

If this breaks, a run with a low masking rate or short documents dies in a division, or trains on NaN, at an
unpredictable step, and differently on every number of ranks.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from modernbert_train.__main__ import main
from modernbert_train.checkpoints.saved_state import GuardState
from tests.support.gloo import run_ranks
from tests.support.ranks import assert_same_weights, train_each
from tests.support.runs import assert_same_run, newest, records
from tests.support.tiny_run import TinyRun

# one label in a batch of 500 tokens, on average
FEW = (
    "phases.long=null",
    "phases.short.batch_warmup=null",
    "phases.short.tokens=3500",
    "objective.mask_rate=0.002",
    "data.validation=null",
    "checkpoint.interval_steps=3",
)


def told(capsys: pytest.CaptureFixture[str]) -> int:
    return "".join(capsys.readouterr()).count("not one token of its batch is predicted")


def guard(folder: Path) -> GuardState:
    return newest(folder).state.training.stability


@pytest.mark.runs
def test_a_batch_without_a_label_is_a_step_of_loss_zero_on_any_number_of_ranks(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is counted, reported once, ignored by the guard, and the count continues on resume."""
    folder = tmp_path / "runs/one"
    assert main(["train", *tiny_run(*FEW, "name=one")]) == 0
    assert told(capsys) == 1, "said once"
    one = records(folder)
    without = [entry["step"] for entry in one if entry["predicted"] == 0]
    assert without[0] <= 3 < without[1] <= 6 < len(one), "a run that shows it before and after a checkpoint"
    assert any(entry["predicted"] == 1 for entry in one), "and one label on one of two ranks"
    for entry in one:
        assert (entry["loss"] == 0) == (entry["grad_norm"] == 0) == (entry["step"] in without)
    last = guard(folder)
    assert last["unlabelled_steps"] == len(without) and 0.0 not in last["losses"]

    for path in sorted((folder / "checkpoints").iterdir())[1:]:
        shutil.rmtree(path)
    assert 0 < guard(folder)["unlabelled_steps"] < len(without)
    assert main(["train", *tiny_run(*FEW, "name=one")]) == 0
    assert guard(folder) == last and told(capsys) == 0, "not reported again by the resumed process"

    strategies = {name: f"distributed.strategy={name}" for name in ("ddp", "fsdp2")}
    lines = [tiny_run(*FEW, f"name={name}", word) for name, word in strategies.items()]
    run_ranks(train_each, 2, lines, False, timeout_seconds=200)
    for name in strategies:
        other = tmp_path / "runs" / name
        assert [entry["predicted"] for entry in records(other)] == [entry["predicted"] for entry in one]
        assert_same_run(other, folder)
        assert_same_weights(other, folder)
