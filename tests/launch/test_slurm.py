"""The rendered script in a real Slurm of one machine: submitted, signalled, requeued, finished."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.slurm import missing, slurm
from tests.support.jobs import RUN, environment, losses
from tests.support.runs import records
from tests.support.tiny_run import TinyRun
from tests.support.waiting import until

pytestmark = [pytest.mark.weekly, pytest.mark.slow]


class Client:
    """Runs Slurm's commands in a test's folder."""

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment() | variables

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, *command: str) -> str:
        """Return the number of the job."""
        return re.findall(r"Submitted batch job (\d+)", self.run(*command))[0]

    def show(self, job: str) -> dict[str, str]:
        """Return Slurm's data of a job."""
        return dict(re.findall(r"(\w+)=(\S+)", self.run("scontrol", "show", "job", job)))


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    if reason := missing():
        pytest.skip(reason)
    with slurm(tmp_path) as found:
        yield Client(tmp_path, found)


def test_a_signalled_job_saves_is_requeued_and_finishes(tiny_run: TinyRun, tmp_path: Path, client: Client) -> None:
    """Slurm signals every process of a job: launcher, ranks and data workers. If that counted as two requests, or
    killed a worker, the run would end without a checkpoint, or with a code that prevents a restart."""
    folder = tmp_path / "runs/tiny"
    words = tiny_run(
        "phases.short.tokens=20000", "phases.short.batch_warmup=null", "data.num_workers=1", "launch.ranks_per_node=2",
        "launch.cpus_per_rank=1", "launch.time_limit_minutes=30", "launch.env.OMP_NUM_THREADS=1",
    )  # fmt: skip
    job = client.submit(*RUN, *words, "--on", "slurm", "--out", "job.sh", "--submit")
    waits = ("PENDING", "RUNNING")
    until(lambda: len(losses(folder)) >= 4 or client.show(job)["JobState"] not in waits, 250, every=0.1)
    client.run("scancel", "--signal=USR1", job)
    until(lambda: client.show(job)["JobState"] not in (*waits, "COMPLETING"), 250, every=0.5)
    state, output = client.show(job), (tmp_path / f"tiny-{job}.log").read_text()
    assert (state["JobState"], state["Restarts"], state["ExitCode"]) == ("COMPLETED", "1", "0:0"), output
    assert "checkpoint written. The same command resumes from here." in output
    steps = records(folder)
    assert len(records(folder, "resume")) == 1 and steps[-1]["tokens"] >= 22000
    assert [entry["step"] for entry in steps] == list(range(1, len(steps) + 1))


def test_a_job_that_failed_waits_for_another_machine_than_the_one_that_is_blamed(
    tiny_run: TinyRun, tmp_path: Path, client: Client
) -> None:
    """A running job cannot exclude machines, and a requeue ends the script that would do it."""
    script = tmp_path / "job.sh"
    words = tiny_run("launch.ranks_per_node=1", "launch.cpus_per_rank=1")
    client.run(*RUN, *words, "--on", "slurm", "--out", str(script))
    launched = 'srun() { hostname > "$MODERNBERT_TRAIN_BLAMED"; return 124; }\n'
    script.write_text(script.read_text().replace("srun --wait", launched + "srun --wait", 1))
    job = client.submit("sbatch", str(script))
    until(lambda: client.show(job).get("Restarts") == "1" and client.show(job)["ExcNodeList"] != "(null)", 100)
    time.sleep(10)  # longer than the delay of a requeued job
    state = client.show(job)
    assert state["JobState"] == "PENDING" and state["ExcNodeList"] == socket.gethostname().split(".")[0], state
