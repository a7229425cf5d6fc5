"""The copier process against a real S3 API on loopback while a run trains, with a store that hangs or fails.

If this breaks, a store that hangs or fails stops training, or its silence is never reported.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from modernbert_train.checkpoints.replica import Replica
from modernbert_train.config.schema import RunConfig
from tests.support.runs import finish, records, start
from tests.support.s3 import BUCKET, Store
from tests.support.small_checkpoint import CONFIG, write
from tests.support.store import server, store  # noqa: F401
from tests.support.tiny_run import TinyRun
from tests.support.waiting import until

pytest.importorskip("s3fs", reason="needs s3fs, which the pinned environment has")
pytestmark = [pytest.mark.timeout(120), pytest.mark.runs]


def config_in(tmp_path: Path, name: str, timeout_seconds: float = 20) -> RunConfig:
    checkpoint = replace(CONFIG.checkpoint, copy_to=f"s3://{BUCKET}/{name}", copy_timeout_seconds=timeout_seconds)
    return replace(CONFIG, runs_folder=str(tmp_path / "runs"), checkpoint=checkpoint)


def copiers() -> list[int]:
    listed = subprocess.run(
        ["pgrep", "-P", str(os.getpid()), "-f", "checkpoints.copier"], capture_output=True, text=True
    )
    return [int(line) for line in listed.stdout.split()]


def test_a_killed_copier_is_started_again(store: Store, tmp_path: Path) -> None:
    config, said = config_in(tmp_path, "killed"), list[str]()
    with Replica(config.checkpoint, Path(config.folder), said.append) as home:
        home.start()
        until(lambda: bool(copiers()))
        os.kill(copiers()[0], signal.SIGKILL)
        until(lambda: any("started again" in line for line in said))
        write(Path(config.folder) / "checkpoints", 5)
    assert any("is in s3://" in line for line in said), said


@pytest.mark.timeout(280)
def test_a_store_that_hangs_is_reported_and_used_again_once_it_answers(store: Store, tmp_path: Path) -> None:
    """The timeout is longer than a busy machine takes to import a client, which would count as hanging too."""
    config, said = config_in(tmp_path, "hangs", timeout_seconds=6), list[str]()
    store.fault, store.faulty_method, store.faults_left = "hang", "PUT", 1000
    with Replica(config.checkpoint, Path(config.folder), said.append) as home:
        home.start()
        write(Path(config.folder) / "checkpoints", 5)
        until(lambda: any("not being copied" in line for line in said), 120)
        store.fault = None
        until(lambda: any("is in s3://" in line for line in said), 120)
    assert "checkpoints are copied again" in said


def test_a_store_that_never_answers_is_not_waited_for_at_the_end(store: Store, tmp_path: Path) -> None:
    config, said = config_in(tmp_path, "never", timeout_seconds=2), list[str]()
    store.fault, store.faulty_method, store.faults_left = "busy", "PUT", 10**9
    with Replica(config.checkpoint, Path(config.folder), said.append) as home:
        home.start()
        write(Path(config.folder) / "checkpoints", 5)
    assert "not all checkpoints are copied" in said[-1], said
    assert copiers() == []


def test_a_run_whose_folder_is_lost_equals_one_that_never_stopped(
    tiny_run: TinyRun, store: Store, tmp_path: Path
) -> None:
    short = ("phases.long=null", "checkpoint.interval_steps=2")
    common = [*short, f"checkpoint.copy_to=s3://{BUCKET}/lost"]
    code, output = finish(tiny_run(*short, "name=whole"))
    assert code == 0, output
    words, folder = tiny_run(*common, "name=lost"), tmp_path / "runs/lost"
    process = start(words)
    until(lambda: (folder / "metrics.jsonl").exists() and len(records(folder)) >= 3, 100)
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 75, output
    assert "is in s3://" in output, output
    shutil.rmtree(folder)  # the machine is gone
    code, output = finish(words)
    assert code == 0 and "brought back from s3://" in output, output
    assert records(folder) == records(tmp_path / "runs/whole")
    shutil.rmtree(folder)
    code, output = finish(words)
    assert code == 0 and "already trained to its end" in output, output
