"""A run's folder: who may use it, with which configuration, and what its record looks like after a crash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modernbert_train.__main__ import read_run
from modernbert_train.errors import ConfigError, StorageError
from modernbert_train.train.run_folder import RunFolder
from tests.conftest import TinyRun


def test_two_jobs_never_write_one_run(tiny_run: TinyRun) -> None:
    """Two writers would interleave two runs in one record; the second is told who the first is."""
    first, second = (RunFolder(read_run(tiny_run())) for _ in range(2))
    first.open()
    with pytest.raises(ConfigError, match=r"in use by process \d+ on .*another name="):
        second.open()
    first.close()
    second.open()
    second.close()


def test_what_only_decides_speed_may_change_and_what_is_trained_may_not(tiny_run: TinyRun) -> None:
    """People move runs to machines with other memory and workers; nobody may change the rate halfway by accident."""
    first = RunFolder(read_run(tiny_run()))
    first.open()
    first.save_config()
    first.close()
    harmless = ("data.num_workers=2", "phases.short.microbatch_tokens=64", "checkpoint.keep=9", "model.attention=sdpa")
    folder = RunFolder(read_run(tiny_run(*harmless)))
    assert len(folder.open()) == len(harmless)
    folder.close()
    for forbidden in ("seed=6", "optim.lr=0.1", "model.num_layers=7", "objective.mask_rate=0.2"):
        with pytest.raises(ConfigError, match=forbidden.split("=")[0]):
            RunFolder(read_run(tiny_run(forbidden))).open()


def test_the_saved_configuration_runs_by_itself(tiny_run: TinyRun) -> None:
    """`train runs/NAME` must mean the run that is there."""
    config = read_run(tiny_run("optim.lr=1e-3"))
    folder = RunFolder(config)
    folder.open()
    folder.save_config()
    folder.close()
    assert read_run([str(folder.path)]) == config


def test_fresh_puts_the_old_run_aside_and_deletes_nothing(tiny_run: TinyRun) -> None:
    folder = RunFolder(read_run(tiny_run()))
    folder.open()
    folder.record({"kind": "step", "step": 1})
    folder.close()
    again = RunFolder(read_run(tiny_run("seed=6")))
    again.open(fresh=True)
    assert not again.metrics.exists()
    (aside,) = folder.path.parent.glob("tiny.until-*")
    assert json.loads((aside / "metrics.jsonl").read_text())["step"] == 1
    with pytest.raises(ConfigError, match="in use"):  # the lock moved with the new folder
        RunFolder(read_run(tiny_run("seed=6"))).open()
    again.close()


def test_going_on_from_a_step_forgets_the_lines_after_it_and_a_torn_last_one(tiny_run: TinyRun) -> None:
    """Steps that are trained again would otherwise stand twice in the record and in the report."""
    folder = RunFolder(read_run(tiny_run()))
    folder.open()
    folder.record({"kind": "start", "step": 0})
    for step in range(1, 6):
        folder.record({"kind": "step", "step": step})
    with folder.metrics.open("a") as file:
        file.write('{"kind": "step", "st')
    folder.rewind_metrics(3)
    assert [entry["step"] for entry in folder.read_metrics()] == [0, 1, 2, 3]
    folder.record({"kind": "step", "step": 4})
    assert [entry["step"] for entry in folder.read_metrics()] == [0, 1, 2, 3, 4]
    folder.close()


def test_a_folder_that_cannot_be_written_is_said_at_once(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Better now than at the first checkpoint."""
    (tmp_path / "runs").write_text("a file where the folder of runs should be")
    with pytest.raises(StorageError, match=r"cannot be written.*runs_folder"):
        RunFolder(read_run(tiny_run())).open()
