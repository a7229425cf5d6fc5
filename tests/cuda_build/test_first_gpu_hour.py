"""The first GPU hour from end to end, on two GPUs that compute nothing.

A node may be available for one hour, once. If a part cannot start, prints unreadable output, or ends the others, that
hour is lost.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cuda_build.front_door import Machine
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


def rehearse(folder: Path, gpus: int, *words: str) -> tuple[subprocess.CompletedProcess[str], Path, dict[str, Any]]:
    """Rehearse the hour, and require that all rules of CUDA and NCCL are kept.

    Returns:
        Its process, its folder, and its parts by name.
    """
    machine = Machine(folder, folder, gpus, settings={"NULL_DEVICE_GB": "200"})
    command = [sys.executable, "-m", "benchmarks.first_gpu_hour", "--rehearse", "--out", str(folder / "hour"), *words]
    done = subprocess.run(command, cwd=ROOT, env=machine.environment(), capture_output=True, text=True)
    assert machine.faults == []
    parts = json.loads((folder / "hour/summary.json").read_text())["parts"]
    return done, folder / "hour", {part["name"]: part for part in parts}


def test_two_and_four_ranks_on_one_gpu(tmp_path: Path) -> None:
    """All uses of NCCL that are possible with a single GPU; comparisons of values fail, as they must."""
    parts = ("text", "one-varlen", "one-muon", *COLLECTIVES, *SHARED)
    done, out, found = rehearse(tmp_path, 1, "--only", *parts)
    assert {name: found[name]["outcome"] for name in SHARED} == dict.fromkeys(SHARED, "passed"), done.stdout
    for name in COLLECTIVES:  # except a barrier, which exchanges no values; short messages may be right by chance
        assert found[name]["outcome"] == "failed" and FAILS[name] in found[name]["reason"], found[name]
        assert found[name]["numbers"]["wrong"] > 15
        assert "ok    barrier on" in (out / f"parts/{name}.log").read_text()
    for name in (*COLLECTIVES, *SHARED):
        log = (out / f"parts/{name}.log").read_text()
        assert "compute on the same GPU" in log and "does not measure speed" in log


def test_the_whole_hour_on_two_gpus(tmp_path: Path) -> None:
    done, out, parts = rehearse(tmp_path, 2)
    assert done.returncode == 1, f"{done.stdout}\n{done.stderr}"
    for name, part in parts.items():
        expected = "failed" if name in FAILS else "skipped" if name in MORE_GPUS else "passed"
        assert part["outcome"] == expected, part
        assert FAILS.get(name, "") in part["reason"], part
        assert name in MORE_GPUS or (out / f"parts/{name}.log").is_file()
    assert parts["all-ddp"]["reason"] == "all GPUs are two here: see the parts two-..."
    unread = {name for name, part in parts.items() if not part["numbers"] and name not in MORE_GPUS}
    assert unread == {"text", "drawn-text"}
    text = (out / "summary.md").read_text()
    assert text.startswith("# First GPU hour, rehearsed: ") and "2 x NVIDIA H100" in text
    assert {file.name for file in out.iterdir()} == {"parts", "work", "summary.md", "summary.json"}
