"""Ranks of one machine through the launcher, after a signal, a death, or with a frozen process."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.run import main
from modernbert_train.__main__ import main as modernbert_train
from modernbert_train.checkpoints.checkpoint import newest_valid
from tests.support.jobs import LONG, RUN, SHORT, Job, alive, children, environment, losses
from tests.support.probed import call_probed
from tests.support.runs import newest
from tests.support.tiny_run import TinyRun
from tests.support.waiting import until

pytestmark = pytest.mark.runs
WEEKLY = (pytest.mark.weekly, pytest.mark.slow)
HERE = socket.gethostname()
FROZEN = f"error: rank 1 on {HERE}: hangs: no sign of life for 5 s\\."
NO_DATA, STACK = "hangs: it has not come beyond 'before_dataloader of step ", r"Current thread.*workers\.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture
def job(tiny_run: TinyRun, tmp_path: Path) -> Job:
    """Return two ranks that train for minutes, in their fourth step or later."""
    words = tiny_run(*LONG, "distributed.timeout_seconds=5", "data.num_workers=1")
    job = Job([*RUN, *words, "--ranks", "2"], tmp_path / "runs/tiny", tmp_path / "log")
    job.wait_for_steps(4)
    return job


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, pytest.param(signal.SIGINT, marks=WEEKLY)])
def test_a_signal_to_the_launcher_or_to_one_rank_saves_all(job: Job, number: signal.Signals) -> None:
    """A scheduler's SIGTERM; SIGUSR1, which Slurm sends to every process of a job, data workers included; and Ctrl-C,
    of which each rank would say something, and of the signal that the launcher passes on."""
    rank = job.ranks()[-1]
    for pid in [rank, *children(rank)] if number == signal.SIGUSR1 else [job.process.pid]:
        os.kill(pid, number)
    code, output = job.end()
    assert code == 75, output
    assert newest(job.folder).step == len(losses(job.folder))
    assert "Traceback" not in output and "error:" not in output
    if number == signal.SIGINT:
        assert "SIGTERM" not in output
        assert output.count("SIGINT") == 1 and output.count("checkpoint written") == 1


@pytest.mark.parametrize(
    ("of_rank", "number", "code", "last", "before"),
    [
        pytest.param(lambda rank: rank, signal.SIGSTOP, 124, "gave no sign of life", FROZEN, id="a frozen rank"),
        pytest.param(
            lambda rank: rank, signal.SIGKILL, 70, "was ended by SIGKILL", "", id="a killed one", marks=WEEKLY
        ),
        # it is alive, and all others wait for it; its own output has its stack
        pytest.param(lambda rank: children(rank)[0], signal.SIGSTOP, 124, NO_DATA, STACK, id="no data", marks=WEEKLY),
    ],
)
def test_a_rank_that_is_lost_ends_the_job_with_its_name(
    job: Job, of_rank: Callable[[int], int], number: signal.Signals, code: int, last: str, before: str
) -> None:
    """Documented: distributed.timeout_seconds and 30 seconds. No process may be left, or it keeps the GPU's memory."""
    ranks = job.ranks()
    os.kill(of_rank(ranks[1]), number)
    found, output = job.end(5 + 30 + 30)  # the last 30 seconds for a machine that is busy with other tests
    assert found == code, output
    assert re.match(f"error: rank 1 on {HERE}:? {last}", output.splitlines()[-1])
    assert re.search(before, output, re.DOTALL)
    assert not any(alive(pid) for pid in ranks)


@pytest.mark.weekly
@pytest.mark.slow
def test_a_killed_torchrun_takes_its_ranks_along(tiny_run: TinyRun, tmp_path: Path) -> None:
    """The store of the ranks dies with it, and a rank that waits for the store must notice; ours: test_kills.py."""
    command = [*TORCHRUN, RUN[1], *tiny_run(*LONG, "data.num_workers=1")]
    job = Job(command, tmp_path / "runs/tiny", tmp_path / "log")
    job.wait_for_steps(2)
    ranks = job.ranks()
    processes = [*ranks, *(worker for rank in ranks for worker in children(rank))]
    assert len(processes) == 4
    job.process.kill()
    job.process.wait()
    until(lambda: not any(map(alive, processes)), 30)
    assert "the launcher of this rank is gone" in job.log.read_text()


@pytest.mark.weekly
@pytest.mark.slow
def test_a_second_signal_ends_at_once(job: Job) -> None:
    """The ranks are stopped, so that they cannot react to the first one."""
    ranks = job.ranks()
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    job.process.send_signal(signal.SIGINT)
    time.sleep(1.5)
    job.process.send_signal(signal.SIGTERM)
    code, output = job.end(20)
    assert code == 128 + signal.SIGTERM, output
    assert not any(alive(pid) for pid in ranks) and newest_valid(job.folder / "checkpoints")[0] is None


@pytest.mark.weekly
@pytest.mark.slow
def test_the_time_limit_saves_before_it_comes(tiny_run: TinyRun, tmp_path: Path) -> None:
    words = tiny_run(*LONG, "launch.time_limit_minutes=1", "launch.save_seconds=20", "phases.short.tokens=4000000")
    code, output = Job([*RUN, *words], tmp_path / "runs/tiny", tmp_path / "log").end(120)
    assert code == 75, output
    assert newest(tmp_path / "runs/tiny").step == len(losses(tmp_path / "runs/tiny"))


COMPOSER = [sys.executable, "-m", "modernbert_train.import_stubs", "composer.cli", "-n", "2", "-m"]


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [[*TORCHRUN, RUN[1]], [*COMPOSER, "modernbert_train", "train"]], ids=["torchrun", "composer"]
)
def test_another_launcher_works_too(tiny_run: TinyRun, tmp_path: Path, command: list[str]) -> None:
    """launch/run.py, or `train`, is then one of its ranks, and starts none."""
    words = [*command, *tiny_run(*SHORT)]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "on      2 x cpu" in done.stdout and len(losses(tmp_path / "runs/tiny")) > 3


def test_gpus_that_stay_idle_are_reported(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise a user pays for eight and trains on four."""
    started = []
    monkeypatch.setattr("launch.run.count_gpus", lambda: 8)
    monkeypatch.setattr(
        "launch.run._start", lambda config, topology, words, *_: started.append(topology.num_ranks) or 0
    )
    words = [*tiny_run("compute.device=auto")]
    assert main(words) == 0 and started == [4]  # a warmup of 4 and 8 rows, then batches of 4
    said = capsys.readouterr().err
    assert said.startswith("launch: 4 of this machine's 8 GPUs take part: more cannot share every global batch evenly.")
    assert (
        "make phases.short.batch_rows, phases.long.batch_rows and the rows of its batch_warmup multiples of 8" in said
    )
    even = ["phases.short.batch_warmup={start_rows: 8, step_rows: 8}", "phases.short.batch_rows=16"]
    assert main([*words, *even, "phases.long.batch_rows=8"]) == 0 and started == [4, 8]
    assert not capsys.readouterr().err
    assert main([*words, "--ranks", "8"]) == 78 and started == [4, 8]  # an explicit number is obeyed or refused


def test_a_single_rank_is_checked_before_torch_is_loaded(tiny_run: TinyRun, tmp_path: Path) -> None:
    """By `train`, in the launcher's process; the run's folder is not created."""
    done = call_probed("launch", *tiny_run(f"data.train={tmp_path}/absent"))
    assert done.returncode == 65 and done.stdout.splitlines()[-1] == "loaded:", done.stderr
    assert f"data.train={tmp_path}/absent: no such folder" in done.stderr and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["--ranks", "2", "--nodes", "2", "--rendezvous", "127.0.0.1:1"],
        ["--ranks", "2", "--nodes", "2", "--on", "slurm"],
        ["launch.nodes=2", "--ranks", "2", "--on", "slurm"],
        None,
    ],
)
def test_wrong_keys_are_reported_with_the_rules_of_all_ranks(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str] | None
) -> None:
    """Each other mistake costs a further try; rows that four ranks cannot share cost a place in a queue."""
    run = tiny_run("optim.lrr=1", "phases.long.batch_rows=6")
    if words is None:  # torchrun's rank
        monkeypatch.setenv("WORLD_SIZE", "4")
        assert modernbert_train(["train", *run]) == 78
    else:
        assert main([*run, *words]) == 78
    said = capsys.readouterr().err
    assert "Did you mean optim.lr?" in said
    assert "phases.long: a global batch of 6 rows cannot be divided evenly among 4 ranks" in said


def test_mistakes_are_reported_before_any_process_starts(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong keys, unequal shares, absent data and no place to meet: four codes that a scheduler should not retry."""
    import launch.run

    def never(*_: object) -> int:
        raise AssertionError("started")

    monkeypatch.setattr(launch.run, "_start", never)
    for words, code in (
        (["optim.lrr=1"], 78),
        (["--ranks", "3"], 78),
        (["--ranks", "1", "--nodes", "3", "--rendezvous", "h:1"], 78),
        (["launch.nodes=2"], 78),
        (["--ranks", "2", f"data.train={tmp_path}/absent"], 65),  # a single rank is checked by `train`
    ):
        assert main([*tiny_run(), *words]) == code, words
        assert capsys.readouterr().err.startswith("error: ")
    assert main([*tiny_run(), "optim.lrr=1", f"data.train={tmp_path}/absent"]) == 78
    said = capsys.readouterr().err
    assert "optim.lrr" in said and f"{tmp_path}/absent" in said  # mistakes of all stages at once
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("launch run.yaml --ranks none", "argument --ranks: "),
        ("launch run.yaml --submit", "Say which with --on"),
        ("sweep run.yaml --result-table", "unrecognized arguments: --result-table"),
        ("sweep run.yaml --results --retry", "--retry"),
        ("pretrain texts --hours 1 --tokens 1M", "--tokens belongs to --size"),
    ],
)
def test_wrong_arguments_end_with_64(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        modernbert_train(words.split())
    assert ended.value.code == 64 and message in capsys.readouterr().err
