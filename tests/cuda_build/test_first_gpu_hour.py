"""The first GPU hour from end to end, on two GPUs that compute nothing.

A node may be available for one hour, once. If a part cannot start, prints unreadable output, or ends the others, that
hour is lost.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_build.null import environment
from tests.support.paths import ROOT

pytestmark = [pytest.mark.runs, pytest.mark.timeout(3000)]

# comparisons with true values must fail on a device that computes none
FAILS = {
    "doctor": "not usable: attention kernel varlen",
    "shared-collectives": "collectives are wrong",
    "shared-collectives-4": "collectives are wrong",
}
# parts that need more GPUs, and parts that replace them with two ranks on one
MORE_GPUS = {"all-ddp", "all-fsdp2", "all-compiled", "all-fsdp2-compiled"} | {
    "shared-ddp", "shared-fsdp2", "shared-compiled",
}  # fmt: skip


SHARED = ("shared-ddp", "shared-fsdp2", "shared-compiled", "shared-muon", "shared-hsdp", "shared-killed")
COLLECTIVES = ("shared-collectives", "shared-collectives-4")


def test_two_and_four_ranks_on_one_gpu(tmp_path: Path) -> None:
    """All uses of NCCL that are possible with a single GPU; comparisons of values fail, as they must."""
    out, faults = tmp_path / "hour", tmp_path / "faults"
    machine = {
        "NULL_DEVICES": "1", "NULL_DEVICE_GB": "200", "NULL_DEVICE_FAULTS": str(faults), "CUDA_VISIBLE_DEVICES": "0",
        "NULL_NCCL": str(tmp_path / "nccl"),
    }  # fmt: skip
    parts = ("text", "one-varlen", "one-muon", *COLLECTIVES, *SHARED)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.first_gpu_hour", "--rehearse", "--out", str(out), "--only", *parts],
        cwd=ROOT,
        env=os.environ | environment() | machine,
        capture_output=True,
        text=True,
    )
    found = {part["name"]: part for part in json.loads((out / "summary.json").read_text())["parts"]}
    assert {name: found[name]["outcome"] for name in SHARED} == dict.fromkeys(SHARED, "passed"), done.stdout
    for name in COLLECTIVES:  # except a barrier, which exchanges no values; short messages may be right by chance
        assert found[name]["outcome"] == "failed" and FAILS[name] in found[name]["reason"], found[name]
        assert found[name]["numbers"]["wrong"] > 15
        assert "ok    barrier on" in (out / f"parts/{name}.log").read_text()
    for name in (*COLLECTIVES, *SHARED):
        log = (out / f"parts/{name}.log").read_text()
        assert "compute on the same GPU" in log and "does not measure speed" in log
    assert not faults.exists(), faults.read_text()


def test_the_whole_hour_on_two_gpus(tmp_path: Path) -> None:
    out, faults = tmp_path / "hour", tmp_path / "faults"
    machine = {
        "NULL_DEVICES": "2",
        "NULL_DEVICE_GB": "200",
        "NULL_DEVICE_FAULTS": str(faults),
        "NULL_NCCL": str(tmp_path / "nccl"),
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.first_gpu_hour", "--rehearse", "--out", str(out)],
        cwd=ROOT,
        env=os.environ | environment() | machine,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, f"{done.stdout}\n{done.stderr}"
    parts = {part["name"]: part for part in json.loads((out / "summary.json").read_text())["parts"]}
    for name, part in parts.items():
        expected = "failed" if name in FAILS else "skipped" if name in MORE_GPUS else "passed"
        assert part["outcome"] == expected, part
        assert FAILS.get(name, "") in part["reason"], part
        assert name in MORE_GPUS or (out / f"parts/{name}.log").is_file()
    assert parts["all-ddp"]["reason"] == "all GPUs are two here: see the parts two-..."
    unread = {name for name, part in parts.items() if not part["numbers"] and name not in MORE_GPUS}
    assert unread == {"text", "drawn-text"}
    assert not faults.exists(), faults.read_text()
    text = (out / "summary.md").read_text()
    assert text.startswith("# First GPU hour, rehearsed: ") and "2 x NVIDIA H100" in text
    assert {file.name for file in out.iterdir()} == {"parts", "work", "summary.md", "summary.json"}
