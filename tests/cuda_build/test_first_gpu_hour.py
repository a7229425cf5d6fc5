"""The first GPU hour from end to end, on two GPUs that compute nothing.

Somebody lends a node for an hour, once. A part that cannot start, whose output cannot be read, or that ends the others,
would be found there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_build.null import ROOT, environment

pytestmark = [pytest.mark.runs, pytest.mark.timeout(3000)]

# what holds numbers against their true values must fail on a device that computes none
FAILS = {"doctor": "not usable: attention kernel varlen", "tuned-1024": "candidates", "tuned-8192": "candidates"}
MORE_GPUS = {"all-ddp", "all-fsdp2", "all-compiled", "all-fsdp2-compiled"}


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
