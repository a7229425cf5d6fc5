"""Programs that are signalled at a given time of their start, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.jobs import environment
from tests.support.paths import ROOT
from tests.support.waiting import catches, until

VERB = [sys.executable, "-m", "modernbert_train"]
LAUNCH = [sys.executable, str(ROOT / "launch/run.py")]
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Ended(NamedTuple):
    """End of a process: its exit code and its standard error."""

    code: int
    errors: str


def begin(command: Sequence[str], folder: Path, **more: str) -> subprocess.Popen[str]:
    """Start a program and return once it handles SIGTERM, in the first lines of its main."""
    with (folder / "errors").open("w") as errors:
        process = subprocess.Popen(
            list(command), env=environment(**more), stdout=subprocess.DEVNULL, stderr=errors, cwd=folder, text=True
        )
    until(lambda: process.poll() is not None or catches(process.pid, signal.SIGTERM), every=0.001)
    return process


def stop_after(
    command: Sequence[str], folder: Path, seconds: float, number: signal.Signals, there: Path | None = None
) -> Ended:
    """Signal a program this long after its start, or after a file exists, and wait for its end."""
    process = begin(command, folder)
    try:
        while there is not None and not there.exists() and process.poll() is None:
            time.sleep(0.002)
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, number)
    try:
        code = process.wait(200)
    finally:
        process.kill()
        process.wait()
    return Ended(code, (folder / "errors").read_text())


def lifetime(command: Sequence[str], folder: Path) -> float:
    """Return the seconds from the first lines of a program's main to its end; it must succeed."""
    process = begin(command, folder)
    began = time.monotonic()
    assert process.wait(400) == 0, (folder / "errors").read_text()
    return time.monotonic() - began
