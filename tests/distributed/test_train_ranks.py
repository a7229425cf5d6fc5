"""The same run on one process and on two, under DDP and FSDP2: the same batches, losses, updates and checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from modernbert_train.__main__ import main
from tests.support.ranks import assert_same_weights, drop_newest
from tests.support.runs import assert_same_run, launch, records
from tests.support.tiny_run import TinyRun


@pytest.mark.runs
def test_two_ranks_train_as_one_does_under_ddp_and_fsdp2(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Losses, gradient norms, updates, validation and final weights within float error; the batches exactly. Then one
    rank continues the run that two sharded ranks began, and ends as if it had always been one."""
    runs = tmp_path / "runs"
    short = ("phases.short.tokens=2500", "phases.long.tokens=1200")
    assert main(["train", *tiny_run(*short, "name=one")]) == 0
    for strategy in ("ddp", "fsdp2"):
        launch(tiny_run(*short, f"name={strategy}", f"distributed.strategy={strategy}", "data.num_workers=1"))
        assert_same_run(runs / strategy, runs / "one")
        assert_same_weights(runs / strategy, runs / "one")

    # the checkpoint of two sharded ranks at the end of their first phase, continued by one process
    drop_newest(runs / "fsdp2")
    assert main(["train", *tiny_run(*short, "name=fsdp2")]) == 0
    assert records(runs / "fsdp2", "resume")
    assert_same_run(runs / "fsdp2", runs / "one")
