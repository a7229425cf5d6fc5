"""A run's folder: its lock, the configuration it accepts, and its record after a crash."""

from __future__ import annotations

import fcntl
import json
import math
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from modernbert_train.__main__ import read_run
from modernbert_train.checkpoints.run_folder import RunFolder
from modernbert_train.errors import ConfigError, DataError, RunError, StorageError
from tests.support.tiny_run import TinyRun

NO_PROCESS = 1 << 22  # above Linux's highest process id


@pytest.fixture
def folder(tiny_run: TinyRun) -> Iterator[RunFolder]:
    """Open the folder of a run, and close it after the test."""
    folder = RunFolder(read_run(tiny_run()))
    folder.open()
    yield folder
    folder.close()


@pytest.mark.runs
def test_two_jobs_never_write_one_run(folder: RunFolder) -> None:
    """Two writers would mix two runs in one record; the second start's error names the first."""
    second = RunFolder(folder.config)
    with pytest.raises(ConfigError, match=r"in use by process \d+ on .*another name="):
        second.open()
    folder.close()
    second.open()
    second.close()


@pytest.mark.parametrize(
    ("owner", "seconds", "kind"),
    [
        ("process 7 on another-machine", 90, RunError),  # power was lost; the disk's server still holds the lock
        (f"process {NO_PROCESS} on {socket.gethostname()}", 90, RunError),  # the previous pod, with the same name
        ("process 7 on another-machine", 30, ConfigError),  # still training
        (f"process {os.getpid()} on {socket.gethostname()}", 90, ConfigError),
        ("", 90, ConfigError),  # unknown owner
    ],
    ids=("lost", "same-name", "trains", "here", "nobody"),  # the same ids in every test process
)
@pytest.mark.parametrize("recorded", [True, False])
def test_a_lock_of_a_machine_that_is_gone_is_tried_again(
    tiny_run: TinyRun, owner: str, seconds: float, kind: type[RunError], recorded: bool
) -> None:
    """A scheduler restarts a job some minutes after its machine was lost; exit code 78 would end it for good."""
    run = RunFolder(read_run(tiny_run()))
    run.path.mkdir(parents=True)
    with (run.path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(owner)
        lock.flush()
        for file in [run.path / ".lock", *([run.metrics] if recorded else [])]:
            file.touch()
            os.utime(file, (time.time() - seconds,) * 2)
        with pytest.raises(RunError, match="in use by") as error:
            run.open()
        assert type(error.value) is kind and error.value.exit_code == (70 if kind is RunError else 78)
        if kind is RunError:
            assert owner in str(error.value) and "for 1.5 minutes" in str(error.value)
    run.open()
    run.close()


def test_a_folder_of_an_earlier_version_says_so_and_what_to_do(folder: RunFolder) -> None:
    """Its keys differ; "unknown key" alone would make users edit a file that they did not write."""
    folder.save_config()
    folder.close()
    saved = folder.path / "config.yaml"
    saved.write_text(saved.read_text() + "device: cpu\n")
    with pytest.raises(ConfigError, match="not written by this version") as error:
        folder.open()
    assert "is now compute.device. Rename it." in str(error.value) and "--fresh" in str(error.value)


def test_the_saved_configuration_runs_by_itself(folder: RunFolder) -> None:
    """`train runs/NAME` must mean the run in that folder."""
    folder.save_config()
    assert read_run([str(folder.path)]) == folder.config


@pytest.mark.runs
def test_fresh_puts_the_old_run_aside_and_deletes_nothing(tiny_run: TinyRun, folder: RunFolder) -> None:
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


def test_resuming_from_a_step_forgets_the_lines_after_it_and_a_torn_last_one(folder: RunFolder) -> None:
    """Otherwise repeated steps would be twice in the record and in the report."""
    folder.record({"kind": "start", "step": 0})
    for step in range(1, 6):
        folder.record({"kind": "step", "step": step})
    with folder.metrics.open("a") as file:
        file.write('{"kind": "step", "st')
    folder.rewind_metrics(3)
    assert [entry["step"] for entry in folder.read_metrics()] == [0, 1, 2, 3]
    folder.record({"kind": "step", "step": 4})
    assert [entry["step"] for entry in folder.read_metrics()] == [0, 1, 2, 3, 4]


def test_damaged_lines_of_the_metrics_are_left_out_with_a_warning(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bad sector in a log must not end a run, and must be reported."""
    folder.record({"kind": "step", "step": 1, "loss": math.nan})
    with folder.metrics.open("ab") as file:
        file.write(bytes(range(256)) + b'\n{"step": "2"}\n{"step": NaN}\n' + b"[" * 100_000 + b"\n")
    folder.record({"kind": "step", "step": 2})
    folder.rewind_metrics(5)
    assert [entry["step"] for entry in folder.read_metrics()] == [1, 2]
    assert f"warning: {folder.metrics}: 5 lines could not be read" in capsys.readouterr().out
    folder.rewind_metrics(5)
    assert capsys.readouterr().out == ""


FAULT = {"step": 4, "tokens_before": 30, "tokens": 40, "fault": "spike", "action": "roll_back", "to": "step-00000003"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (bytes(range(256)), "1|2 lines are not JSON"),
        (b"[]", "1 lines are not JSON or lack a step"),
        (b"[" * 100_000, "1 lines are not JSON"),
        *(
            (json.dumps({k: v for k, v in FAULT.items() if k != key}).encode(), rf"entry 2: {key}: expected")
            for key in ("tokens_before", "tokens", "fault", "action", "to")
        ),
        (json.dumps(FAULT | {"action": []}).encode(), "entry 2: action: expected text, found list"),
        (json.dumps(FAULT | {"tokens_before": "30"}).encode(), "entry 2: tokens_before: expected a whole number"),
        (json.dumps(FAULT | {"to": "../.."}).encode(), "entry 2: to: expected the name of a checkpoint"),
        (json.dumps(FAULT | {"step": 1e308}).encode(), "1 lines are not JSON or lack a step"),
    ],
)
def test_a_damaged_record_of_faults_ends_the_start_with_its_name(folder: RunFolder, line: bytes, message: str) -> None:
    """If it were skipped silently, an update that was left out would be applied the second time."""
    folder.record_fault(FAULT)
    assert folder.read_faults()[0]["to"] == "step-00000003"
    with folder.faults.open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(StorageError, match=rf"faults\.jsonl: damaged; .*{message}"):
        folder.read_faults()


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "starts.jsonl"])
def test_a_link_in_the_folder_is_not_written_through(tiny_run: TinyRun, tmp_path: Path, name: str) -> None:
    """For a run's folder from an archive: its lock would be emptied, and with it any file that the link names."""
    folder, victim = RunFolder(read_run(tiny_run())), tmp_path / "victim"
    victim.write_text("stays")
    folder.path.mkdir(parents=True)
    (folder.path / name).symlink_to(victim)
    with pytest.raises(DataError, match="outside its folder, which is not followed"):
        folder.open()
    assert victim.read_text() == "stays"


def test_a_record_of_a_start_hides_secrets(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    folder.record_start({"kind": "end", "error": "401: 0123456789abcdef is refused", "command": ["--api-key=1234567"]})
    said = (folder.path / "starts.jsonl").read_text()
    assert "0123456789abcdef" not in said and "401: *** is refused" in said
    assert "1234567" not in said and "--api-key=***" in said
