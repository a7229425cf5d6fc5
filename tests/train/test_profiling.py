"""The section `profile`: it writes its files, survives the end of a run, and does not disturb the run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modernbert_train.__main__ import main
from modernbert_train.config.schema import ProfileConfig
from modernbert_train.train.profiling import Profile, device_rows, host_rows, table
from tests.support.runs import metrics
from tests.support.tiny_run import TinyRun


@pytest.mark.slow
def test_a_run_with_all_its_figures_and_a_profile(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One run by its command: figures that add up, a trace that opens."""
    words = tiny_run("profile={steps: 2, skip: 3}", "data.validation=null", "logging.line_seconds=0.001")
    assert main(["train", *words]) == 0
    output = capsys.readouterr().out

    folder = tmp_path / "runs/tiny"
    steps = metrics(folder, "step")
    assert "\ntiny: " in output and f", {len(steps)} steps, " in output
    flops = sum(step["rank_flops_per_second"] * step["seconds"] for step in steps)
    planned = float(output.split(" steps, ")[1].split()[0])
    assert flops == pytest.approx(planned, rel=0.05)  # the plan knows the mean document, the meter every one
    assert all(0 < step["data_wait_share"] < 1 and step["grad_norm"] > 0 and "mfu" not in step for step in steps)
    assert steps[-1]["seconds_left"] == 0 < steps[0]["seconds_left"]
    assert output.count("FLOP/s  wait") == len(steps)

    (trace,) = (folder / "profile").glob("*.json.gz")
    assert trace.name == "steps-4-5.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert len({event["name"] for event in events if str(event.get("name")).startswith("ProfilerStep#")}) == 2
    ten = (folder / "profile/steps-4-5.txt").read_text().splitlines()
    assert len(ten) == 12 and ten[0].startswith("operators by their own CPU time") and "in 2 steps" in ten[0]
    assert any("aten::" in line for line in ten) and ten[2] in output  # the slowest one depends on the load


def run_steps(profile: Profile, count: int) -> None:
    """Run steps 21, 22, ... of a run, and end it."""
    profile.begin()
    for number in range(21, 21 + count):
        torch.ones(4, 4) @ torch.ones(4, 4)
        profile.after_step(number)
    profile.close()


def a_profile(folder: Path, said: list[str]) -> Profile:
    progress: Any = SimpleNamespace(line=said.append)
    return Profile(ProfileConfig(steps=3, skip=2), folder, torch.device("cpu"), progress)


def test_a_run_that_ends_too_soon_says_so_or_writes_what_there_is(tmp_path: Path) -> None:
    """The steps before a crash may be the most interesting ones."""
    said: list[str] = []
    run_steps(a_profile(tmp_path / "none", said), 2)
    assert not (tmp_path / "none").exists() and "profile.skip=2" in said[0]
    run_steps(a_profile(tmp_path / "some", said), 4)
    assert sorted(path.name for path in (tmp_path / "some").iterdir()) == ["steps-23-24.json.gz", "steps-23-24.txt"]
    assert "in 2 steps" in (tmp_path / "some/steps-23-24.txt").read_text()


def test_a_disk_that_refuses_the_profile_does_not_cost_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "profile").write_text("a file where the folder belongs")
    run_steps(a_profile(tmp_path / "profile", said), 6)
    assert said[0].startswith(f"warning: the profile could not be written to {tmp_path / 'profile'}")


def averages() -> list[Any]:
    def one(key: str, device: str, cpu: float, own: float, count: int, annotation: bool = False) -> Any:
        kind = SimpleNamespace(name=device)
        return SimpleNamespace(
            key=key, device_type=kind, self_cpu_time_total=cpu, self_device_time_total=own, count=count,
            is_user_annotation=annotation,
        )  # fmt: skip

    return [
        one("aten::mm", "CPU", 3000.0, 9000.0, 20),  # includes its kernel's time, which must not count twice
        one("ProfilerStep#4", "CPU", 5000.0, 0.0, 1),
        one("void gemm<" + "x" * 100 + ">", "CUDA", 0.0, 9000.0, 20),
        one("ProfilerStep#4", "CUDA", 0.0, 20000.0, 1, annotation=True),
        one("Memcpy HtoD", "CUDA", 0.0, 1000.0, 2),
    ]


def test_host_and_gpu_are_distinguished_and_nothing_counts_twice() -> None:
    assert host_rows(averages()) == [("aten::mm", 3000.0, 20)]
    rows = device_rows(averages())
    assert [row[1:] for row in rows] == [(9000.0, 20), (1000.0, 2)]
    lines = table("kernels by GPU time", rows, 0.02, 2).splitlines()
    assert lines[0] == "kernels by GPU time: 0.010 s in 2 steps of 0.020 s together"
    assert lines[2].split()[:3] == ["4.50", "90.0%", "10.0"] and lines[2].endswith("...")
    assert lines[3].split() == ["0.50", "10.0%", "1.0", "Memcpy", "HtoD"]
    assert len(table("many", rows * 20, 1.0, 1).splitlines()) == 12
