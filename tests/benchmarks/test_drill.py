"""The drill: a round of injuries of each kind, and that it would notice a run that was not the same any more.

If this breaks, "nothing lost" is worth nothing, or something is lost.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks.drill.__main__ import read, table
from benchmarks.drill.damaged import flip_bit, nodes, truncate
from benchmarks.drill.injuries import INJURIES
from benchmarks.drill.lab import Ended, Lab, Result
from tests.support import forked
from tests.support.paths import ROOT


def drill(out: Path, *words: str) -> tuple[int, str]:
    """A separate program, forked from a single-threaded one, like its runs."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.drill", "--out", str(out), *words]
    done = forked.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_injuries_of_every_kind_are_survived() -> None:
    """One round of each; `make drill` has more than a thousand. The path is short, since a socket's must be."""
    with tempfile.TemporaryDirectory() as folder:
        code, said = drill(Path(folder), "--scale", "quick")
        assert code == 0, said
        found = read(Path(folder) / "outcomes-1.jsonl")
    assert "| **all** |" in said and {outcome.verdict for _, outcome in found} <= {"survived", "refused"}


def test_a_round_is_drawn_from_its_seed_kind_and_number_alone(tmp_path: Path) -> None:
    lab, again = Lab(tmp_path, 7, private=False), Lab(tmp_path, 7, private=False)
    assert lab.draw("kill", 3).random() == again.draw("kill", 3).random() != lab.draw("kill", 4).random()
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    flip_bit(path, lab.draw("flip", 1))
    assert sum(byte.bit_count() for byte in path.read_bytes()) == 1
    truncate(path, lab.draw("cut"))
    assert path.stat().st_size < 100
    assert len(list(nodes({"a": [1, {"b": 2}], "c": 3}))) == 3


@pytest.mark.parametrize(
    ("ended", "codes", "wrong"),
    [
        (Ended(0, "done"), (0,), False),
        (Ended(74, "error: x: cannot be written"), (74,), False),
        (Ended(74, "something"), (74,), True),
        (Ended(70, "Traceback (most recent call last):\nerror: x"), (70,), True),
        (Ended(0, "done"), (74,), True),
        (Ended(999, ""), (0,), True),
    ],
)
def test_an_end_is_right_or_wrong(ended: Ended, codes: tuple[int, ...], wrong: bool) -> None:
    assert bool(ended.wrong(*codes)) == wrong


@pytest.mark.parametrize("changed", [{"loss": 1.5000001}, {"tokens": 11}, {"step": 2}])
def test_a_run_that_is_not_the_same_any_more_is_noticed(tmp_path: Path, changed: dict[str, float]) -> None:
    lab = Lab(tmp_path, 1, private=False)
    run = lab.run()
    run.folder.mkdir(parents=True)
    line = {"kind": "step", "step": 1, "tokens": 10, "loss": 1.5}
    (run.folder / "metrics.jsonl").write_text(json.dumps(line | changed) + '\n{"torn')
    assert "the uninterrupted run has" in run.differs(Result([line], ""))
    assert "2 records" not in run.differs(Result([line], "")) and "has 2" in run.differs(Result([line, line], ""))


def test_the_table_counts_by_kind(tmp_path: Path) -> None:
    kept = tmp_path / "outcomes"
    rows = [("kill", "survived"), ("kill", "lost"), ("two-jobs", "refused"), ("read-only", "skipped")]
    entries = [{"injury": name, "what": "", "verdict": verdict, "detail": ""} for name, verdict in rows]
    kept.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert f"| {INJURIES['kill'].what} | 2 | 1 | 0 | 1 |" in table(kept)
    assert "| **all** | **3** | **1** | **1** | **1** |" in table(kept) and "not possible here" in table(kept)
