"""Sweeps of the fake run (fake_run.py), created in a test's folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.sweeps.space import Space, make_space
from launch.sweeps.trial_store import Store, slots
from launch.sweeps.worker import Worker
from modernbert_train.config.load import load_typed
from modernbert_train.config.tools.sweep import SweepConfig

FAKE = (sys.executable, "-S", str(Path(__file__).parents[1] / "launch/fake_run.py"))
SPACE = "{optim.lr: {low: 1e-4, high: 1e-2, log: true}}"


def spec(run: Sequence[str], folder: Path, *overrides: str, space: str = SPACE) -> SweepConfig:
    """Return a sweep over the run of `tiny_run()`, in folder/home/sweep."""
    text = (
        f"name: sweep\nruns_folder: {folder}/home\nrun: [{run[0]}]\nsampler: random\ntrials: 3\nheartbeat_seconds: 1\n"
    )
    file = folder / "sweep.yaml"
    file.write_text(f"{text}space: {space}\n", encoding="utf-8")
    (folder / "home").mkdir(exist_ok=True)
    return load_typed(SweepConfig, [file], overrides)


def run_fake(sweep: SweepConfig, *plays: str, retry: bool = False) -> dict[int, list[Any]]:
    """Run a sweep of the fake run to its end; return the attempts at each trial."""
    space = make_space(sweep)
    Path(sweep.runs_folder, "fake.txt").write_text("\n".join(plays))
    Worker(space, FAKE, sweep.workers).run(retry=retry)
    return attempts(space)


def attempts(space: Space) -> dict[int, list[Any]]:
    return slots(Store(space).attempts())


def log(sweep: SweepConfig, kind: str) -> list[str]:
    """Return the logged events of one kind of the fake runs, in order."""
    lines = Path(sweep.runs_folder, "log.txt").read_text().splitlines()
    return [line.removeprefix(f"{kind} ") for line in lines if line.startswith(f"{kind} ")]
