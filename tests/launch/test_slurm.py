"""The rendered script in a real Slurm of one machine: submitted, signalled, requeued, finished."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.launch.slurm import missing, slurm
from tests.support.jobs import RUN, environment, losses
from tests.support.tiny_run import TinyRun


def show(job: str, environment: dict[str, str]) -> dict[str, str]:
    """Return Slurm's data of a job."""
    done = subprocess.run(["scontrol", "show", "job", job], env=environment, capture_output=True, text=True, timeout=30)
    return dict(re.findall(r"(\w+)=(\S+)", done.stdout))


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_signalled_job_saves_is_requeued_and_finishes(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Slurm signals every process of a job: launcher, ranks and data workers. If that counted as two requests, or
    killed a worker, the run would end without a checkpoint, or with a code that prevents a restart."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path / "runs/tiny"
    words = tiny_run(
        "phases.short.tokens=20000", "phases.short.batch_warmup=null", "data.num_workers=1", "launch.ranks_per_node=2",
        "launch.cpus_per_rank=1", "launch.time_limit_minutes=30", "launch.env.OMP_NUM_THREADS=1",
    )  # fmt: skip
    with slurm(tmp_path) as found:
        client = environment() | found
        command = [*RUN, *words, "--on", "slurm", "--out", "job.sh", "--submit"]
        done = subprocess.run(command, env=client, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        job = re.findall(r"Submitted batch job (\d+)", done.stdout)[0]
        deadline = time.monotonic() + 250
        while len(losses(folder)) < 4:
            assert time.monotonic() < deadline and show(job, client)["JobState"] in ("PENDING", "RUNNING")
            time.sleep(0.1)
        subprocess.run(["scancel", "--signal=USR1", job], env=client, check=True, timeout=30)
        while (state := show(job, client))["JobState"] in ("PENDING", "RUNNING", "COMPLETING"):
            assert time.monotonic() < deadline, state
            time.sleep(0.5)
    output = (tmp_path / f"tiny-{job}.log").read_text()
    assert (state["JobState"], state["Restarts"], state["ExitCode"]) == ("COMPLETED", "1", "0:0"), output
    assert "checkpoint written. The same command resumes from here." in output
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [entry["kind"] for entry in entries].count("resume") == 1
    steps = [entry["step"] for entry in entries if entry["kind"] == "step"]
    assert steps == list(range(1, len(steps) + 1)) and entries[-1]["tokens"] >= 22000


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_job_that_failed_waits_for_another_machine_than_the_one_that_is_blamed(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    """A running job cannot exclude machines, and a requeue ends the script that would do it."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    script = tmp_path / "job.sh"
    words = tiny_run("launch.ranks_per_node=1", "launch.cpus_per_rank=1")
    assert (
        subprocess.run([*RUN, *words, "--on", "slurm", "--out", str(script)], cwd=tmp_path, timeout=60).returncode == 0
    )
    launched = 'srun() { hostname > "$MODERNBERT_TRAIN_BLAMED"; return 124; }\n'
    script.write_text(script.read_text().replace("srun --wait", launched + "srun --wait", 1))
    with slurm(tmp_path) as found:
        client = environment() | found
        done = subprocess.run(
            ["sbatch", str(script)], env=client, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        job = re.findall(r"Submitted batch job (\d+)", done.stdout)[0]
        deadline = time.monotonic() + 100
        while (state := show(job, client)).get("Restarts") != "1" or state["ExcNodeList"] == "(null)":
            assert time.monotonic() < deadline, (state, (tmp_path / f"tiny-{job}.log").read_text())
            time.sleep(0.2)
        time.sleep(10)  # longer than the delay of a requeued job
        state = show(job, client)
        assert state["JobState"] == "PENDING" and state["ExcNodeList"] == socket.gethostname().split(".")[0], state
