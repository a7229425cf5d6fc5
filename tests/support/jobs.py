"""Launched runs for tests: start one, wait until it trains, inspect its processes and its record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support import forked
from tests.support.paths import ROOT

RUN = [sys.executable, str(ROOT / "launch/run.py")]
LONG = ("phases.short.tokens=400000", "phases.short.batch_warmup=null")
SHORT = (
    "phases.short.tokens=1500",
    "phases.short.batch_warmup=null",
    "phases.long.tokens=1200",
    "data.validation=null",
)


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without variables of a surrounding launcher, and with one thread."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PET_"))}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | more


class Job:
    """A launcher forked from the warm server; its output goes to a file, so that it never blocks on a pipe.

    Attributes:
        folder: the run's folder.
    """

    def __init__(self, command: Sequence[str], folder: Path, log: Path) -> None:
        self.folder, self.log = folder, log
        with log.open("w") as output:
            self.process = forked.Popen(
                list(command), env=environment(), stdout=output, stderr=subprocess.STDOUT, cwd=log.parent
            )

    def wait_for_steps(self, steps: int, seconds: float = 150) -> None:
        wait_for_steps(self.folder, steps, [self.process], seconds)

    def ranks(self) -> list[int]:
        return children(self.process.pid)

    def end(self, seconds: float = 100) -> tuple[int, str]:
        """Wait for the end; return exit code and output."""
        try:
            code = self.process.wait(seconds)
        finally:
            for pid in [*self.ranks(), self.process.pid]:
                if alive(pid):
                    os.kill(pid, 9)
            self.process.wait()
        return code, self.log.read_text()


def wait_for_steps(
    folder: Path, steps: int, processes: Sequence[subprocess.Popen[Any] | forked.Popen], seconds: float = 150
) -> None:
    """Wait until the run has recorded this many steps; fail if it ends before."""
    deadline = time.monotonic() + seconds
    while len(losses(folder)) < steps:
        assert all(process.poll() is None for process in processes), "the run ended before"
        assert time.monotonic() < deadline, "the run makes no progress"
        time.sleep(0.05)


def losses(folder: Path) -> list[float]:
    """Return the losses of all recorded steps."""
    file = folder / "metrics.jsonl"
    entries = [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []
    return [entry["loss"] for entry in entries if entry["kind"] == "step"]


def children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(path.parent.name))
    return sorted(found)


def alive(pid: int) -> bool:
    """Return True if a process runs or is stopped; False for a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
