"""The processes of candidates: as many as memory holds at a time, each started when it is first asked."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from modernbert_train.config.load import to_yaml
from modernbert_train.core.files import write_whole
from modernbert_train.train.tune.candidates import Case, Settings, candidate_run, label
from modernbert_train.train.tune.process import Failure, Process

START_SECONDS = 900.0  # to build, to compile and to take the first steps
STEP_SECONDS = 120.0  # for a turn, whatever it is expected to take
SLOWEST = 30.0  # times the expected seconds of a turn
_MOST = 8  # processes at a time on a CPU

Commands = Callable[[Path], list[str]]  # the file of a candidate's run -> what starts its worker


def launch(case: Case, folder: Path, command: Commands, settings: Settings, *, rows: int | None = None) -> Process:
    """Start the worker of a candidate; its run, which can be looked at, and its errors are in the folder."""
    name = hashlib.sha256(f"{label(settings)} {rows}".encode()).hexdigest()[:8]
    for each in ("candidates", "logs"):
        (folder / each).mkdir(exist_ok=True)
    file = folder / "candidates" / f"{name}.yaml"
    write_whole(file, to_yaml(candidate_run(case, settings, rows=rows)))
    return Process(command(file), folder / "logs" / f"{name}.log")


class Pool:
    """Candidates that train in turns.

    Args:
        launch: starts the process of some settings.
        most: processes at a time.
        limit_bytes: of memory on a GPU that a candidate may take; None: all there is.

    Attributes:
        first_seconds: of the first step of settings, by their label, when they were first started and not compiled yet.
    """

    def __init__(self, launch: Callable[[Settings], Process], most: int = 1, limit_bytes: float | None = None) -> None:
        self._launch = launch
        self.most = most
        self._limit_bytes = limit_bytes
        self._alive: dict[str, Process] = {}
        self._seconds: dict[str, float] = {}  # of a step
        self.first_seconds: dict[str, float] = {}

    def start(self, settings: Settings) -> Mapping[str, Any]:
        """Begin to train with some settings; what `start` of worker.py says.

        Raises:
            Failure: it cannot be.
        """
        name = label(settings)
        while len(self._alive) >= self.most:
            self._end(next(iter(self._alive)))
        process = self._alive[name] = self._launch(settings)
        with self._ended_by_failure(name):
            found = process.ask(START_SECONDS, do="start")
            if self._limit_bytes is not None and found["peak_bytes"] > self._limit_bytes:
                taken, limit = found["peak_bytes"] / 1e9, self._limit_bytes / 1e9
                raise Failure(f"it takes {taken:.1f} GB, and {limit:.1f} leave room for several ranks", full=True)
        self._seconds[name] = found["seconds"]
        self.first_seconds.setdefault(name, found["first_seconds"])
        return found

    def steps(self, settings: Settings, number: int) -> list[float]:
        """Take steps with some settings; tokens a second of each.

        Raises:
            Failure: it cannot be.
        """
        name = label(settings)
        if name not in self._alive:
            self.start(settings)
        process = self._alive[name]
        with self._ended_by_failure(name):
            limit = max(STEP_SECONDS, SLOWEST * number * self._seconds[name])
            rates: list[float] = process.ask(limit, do="steps", number=number)["tokens_per_second"]
        return rates

    @contextmanager
    def _ended_by_failure(self, name: str) -> Iterator[None]:
        try:
            yield
        except Failure:
            self._end(name)
            raise

    def room_for(self, peak_bytes: float, free_bytes: float) -> None:
        """Hold as many processes of this size as half of the free memory takes; at least two, who take turns."""
        self.most = max(2, min(_MOST, int(free_bytes / 2 / max(1.0, peak_bytes))))

    def close(self) -> None:
        """End all of them."""
        for name in list(self._alive):
            self._end(name)

    def _end(self, name: str) -> None:
        self._alive.pop(name).close()
