"""A candidate's process, from outside: it may run out of memory, crash or hang, and what comes of it is an answer."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from modernbert_train.distributed.many import start

MARK = "tune: "  # before an answer, among whatever libraries print
_END_SECONDS = 5.0  # for a worker to end when its commands do


class Failure(Exception):
    """A candidate's process did not do what it was asked.

    Attributes:
        text: why, in a line.
        full: memory did not suffice.
    """

    def __init__(self, text: str, full: bool = False) -> None:
        super().__init__(text)
        self.text, self.full = text, full


def command_of(config: Path) -> list[str]:
    """The command of the worker of a candidate."""
    return [sys.executable, "-m", "modernbert_train.train.tune.worker", str(config)]


class Process:
    """The worker of one candidate.

    Args:
        command: starts it.
        log: file for what it prints on standard error.
    """

    def __init__(self, command: list[str], log: Path) -> None:
        self._log = log.open("a", encoding="utf-8")
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log, "text": True}
        self._process = start(command, os.environ, **pipes)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self._output:
            for line in self._output:
                self._lines.put(line)
        self._lines.put(None)

    def ask(self, seconds: float, **command: Any) -> dict[str, Any]:
        """Have it do something, and wait for the answer.

        Args:
            seconds: after which it is taken to hang, and ended.
            command: see worker.py.

        Raises:
            Failure: it could not, or there is no answer.
        """
        try:
            self._input.write(json.dumps(command) + "\n")
            self._input.flush()
            while (line := self._lines.get(timeout=seconds)) is not None:
                if line.startswith(MARK):
                    found: dict[str, Any] = json.loads(line.removeprefix(MARK))
                    if "error" in found:
                        raise Failure(found["error"], found.get("out_of_memory", False))
                    return found
        except queue.Empty:
            self.kill()
            raise Failure(f"it gave no answer within {seconds:g} s") from None
        except (BrokenPipeError, ValueError):
            pass
        raise self._ended()

    def _ended(self) -> Failure:
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return Failure("it closed its output and did not end")
        if code == -signal.SIGKILL:
            return Failure("its process was ended by SIGKILL, as the system does when memory is full", full=True)
        if code < 0:
            return Failure(f"its process was ended by {signal.Signals(-code).name}")
        return Failure(f"its process ended with exit code {code}")

    def close(self) -> None:
        """Have it end, and end it if it does not."""
        with suppress(BrokenPipeError):
            self._input.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End it with all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(_END_SECONDS)
        with suppress(BrokenPipeError):
            self._input.close()
        self._log.close()
