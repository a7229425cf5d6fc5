"""The same run on one process and on two, under DDP and FSDP2: the same batches, losses, updates and checkpoints."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from modernbert_train.__main__ import main
from modernbert_train.checkpoints.checkpoint import newest_valid
from tests.support import forked
from tests.support.paths import ROOT
from tests.support.runs import assert_same_run, launch, records, weights
from tests.support.tiny_run import TinyRun


@pytest.mark.runs
@pytest.mark.timeout(290)
def test_two_ranks_train_as_one_does_under_ddp_and_fsdp2(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Losses, gradient norms, updates, validation and final weights within float error; the batches exactly. Then one
    rank continues the run that two sharded ranks began, and ends as if it had always been one."""
    runs = tmp_path / "runs"
    short = ("phases.short.tokens=2500", "phases.long.tokens=1200")
    assert main(["train", *tiny_run(*short, "name=one")]) == 0
    for strategy in ("ddp", "fsdp2"):
        launch(tiny_run(*short, f"name={strategy}", f"distributed.strategy={strategy}", "data.num_workers=1"))
        assert_same_run(runs / strategy, runs / "one")
        for name, tensor in weights(runs / strategy).items():
            torch.testing.assert_close(tensor, weights(runs / "one")[name], rtol=2e-3, atol=2e-5)

    # the checkpoint of two sharded ranks at the end of their first phase, continued by one process
    moved = runs / "fsdp2/checkpoints"
    last = max(moved.iterdir(), key=lambda path: path.name)
    for path in last.iterdir():
        path.unlink()
    last.rmdir()
    assert main(["train", *tiny_run(*short, "name=fsdp2")]) == 0
    assert records(runs / "fsdp2", "resume")
    assert_same_run(runs / "fsdp2", runs / "one")


@pytest.mark.runs
@pytest.mark.timeout(120)
def test_a_signal_to_the_launcher_saves_on_all_ranks(tiny_run: TinyRun, tmp_path: Path) -> None:
    """A scheduler's SIGTERM: all ranks finish the step, one checkpoint is written, the launcher says 75."""
    folder = tmp_path / "runs/tiny"
    command = [sys.executable, str(ROOT / "launch/run.py"), *tiny_run("phases.short.tokens=40000"), "--ranks", "2"]
    process = forked.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        if (folder / "metrics.jsonl").exists() and len(records(folder)) > 2:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, output = process.communicate(timeout=60)
    assert process.returncode == 75, output
    found, _ = newest_valid(folder / "checkpoints")
    assert found is not None and found.step == records(folder)[-1]["step"]
