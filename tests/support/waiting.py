"""Wait for other processes, and stand in for programs that they start."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path


def until(found: Callable[[], object], seconds: float = 60, every: float = 0.02) -> float:
    """Wait until `found` returns something true; return the seconds it took."""
    began = time.monotonic()
    while not found():
        assert time.monotonic() < began + seconds, f"not within {seconds:g} s"
        time.sleep(every)
    return time.monotonic() - began


def catches(pid: int, number: signal.Signals) -> bool:
    """Return True if a process has a handler for a signal."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    return any(int(line.split()[1], 16) >> number - 1 & 1 for line in lines if line.startswith("SigCgt:"))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def stand_in(folder: Path, name: str, script: str) -> Path:
    """Write a shell program of this name, which a test puts into its PATH."""
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    return program
