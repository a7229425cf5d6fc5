"""The picture of a run's losses, which a page shows: its points are the run's own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT


@pytest.mark.runs
def test_a_run_is_drawn_by_its_tokens(tmp_path: Path) -> None:
    """Steps on a straight line from 8 to 4 are drawn on it, and the two held-out losses where they were measured."""
    steps = [{"kind": "step", "step": n, "tokens": n * 1e4, "loss": 8 - 4 * n / 200, "time": n} for n in range(1, 201)]
    held_out = [{"kind": "validation", "step": n, "tokens": n * 1e4, "loss": 8 - n / 50, "time": n} for n in (100, 200)]
    (tmp_path / "a&b").mkdir()
    lines = sorted(steps + held_out, key=lambda line: line["step"])
    (tmp_path / "a&b/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-m", "benchmarks.curves", "a&b", "--out", "curves.svg"]
    environment = {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    svg = (tmp_path / "curves.svg").read_text()
    held, mean = (
        [tuple(map(float, at.split(","))) for at in line.split()] for line in re.findall(r'points="(.+?)"', svg)
    )
    assert "a&amp;b, held out 4.000<" in svg and "a&amp;b, training 4.030<" in svg
    assert held == [(290, 178), (530, 340)] and len(mean) == 50
    assert mean[0][1] == 20 and mean[-1][0] == 530, "from the highest loss to the last token"
