"""Tasks for tests of the worker processes, which import them from this module."""

from __future__ import annotations

import fcntl
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from modernbert_train.errors import DataError


class KilledAtTwo:
    def run_task(self, rank: int) -> None:
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)


class BadData:
    def run_task(self, rank: int) -> None:
        raise DataError(f"bad line {rank}")


@dataclass
class Squares:
    path: Path

    def run_task(self, rank: int) -> None:
        with self.path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(f"{rank * rank}\n")
