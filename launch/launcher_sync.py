"""Exchange rank outcomes between launchers; stop local ranks when another machine fails.

A killed rank cannot report its end, and a rank that is blocked in a CUDA call may not read another's error. The
launcher does no computation, so it can always watch and kill. It uses the ranks' rendezvous store, and the key under
which they post an error (fail_together.py).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # its types forget them

from launch.rendezvous import LINGER_SECONDS
from modernbert_train.distributed.fail_together import ERROR, entry_text
from modernbert_train.distributed.group import STORE_PREFIX
from modernbert_train.distributed.heartbeat import is_running
from modernbert_train.distributed.launched import LEFT
from modernbert_train.distributed.stop_signals import STOP_SIGNALS
from modernbert_train.errors import RunError, StoppedEarly

STUCK_SECONDS = 15.0  # after a kill the agent needs less, unless it waits for a machine that is cut off
_LOOK_SECONDS = 0.05  # the agent polls exit codes every 0.1 s
_LISTEN_SECONDS = 0.5
_HEARD_SECONDS = 5.0  # a rank reads an error within a second; one that has not by now is killed
_OWN_SECONDS = 30.0  # for the rank that posted the error: the agent's own grace period
STOPPED = tuple(-number for number in STOP_SIGNALS)  # exit codes before Python could handle the signal


class Rank:
    """A rank of this machine, read from its heartbeat file: `NUMBER` contains its process id."""

    def __init__(self, file: Path) -> None:
        pid, _, rest = file.read_text(encoding="utf-8").partition(" ")
        self.number, self.pid, self.left = int(file.name), int(pid or 0), rest == LEFT
        self.runs = self.pid != 0 and is_running(self.pid)


def ranks_in(folder: Path) -> list[Rank]:
    """Return the ranks of this machine that have joined the others."""
    return [Rank(file) for file in sorted(folder.iterdir())]


class LauncherSync:
    """Watcher of this machine's ranks and of the store, active while the ranks run.

    Args:
        store: connection to the ranks' rendezvous store.
        folder: of their heartbeat files.
        num_ranks: of this machine.
        stopping: True once a signal has requested a stop.

    Attributes:
        first_error: the first error of any rank of the run; None without any.
        killed: ranks that were killed because they did not react to it.
    """

    def __init__(self, store: TCPStore, folder: Path, num_ranks: int, stopping: Callable[[], bool]) -> None:
        self.first_error: dict[str, Any] | None = None
        self.killed: set[int] = set()
        self._store = PrefixStore(STORE_PREFIX, store.clone())  # type: ignore[attr-defined]
        self._folder, self._num_ranks, self._stopping = folder, num_ranks, stopping
        self._codes: dict[int, int] = {}
        self._posted: set[int] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, after the ranks have ended."""
        self._over.set()
        self._thread.join(2 * _HEARD_SECONDS)  # not for ever: the store may be frozen
        if not self._thread.is_alive():
            with suppress(RuntimeError):  # the store is lost, and so are its readers
                self._read_error()

    def post_outcome(self, code: int, message: str, *, blames: bool) -> None:
        """Post how this machine's ranks ended, and whether that may be its fault, unless an error was posted before."""
        if self.first_error is None and not self._thread.is_alive():
            with suppress(RuntimeError):
                host = socket.gethostname()
                self._write({"rank": None, "host": host, "text": message, "blames": blames, "code": code})

    def _watch(self) -> None:
        since: float | None = None
        looked = 0.0
        while not self._over.wait(_LOOK_SECONDS):
            ranks = ranks_in(self._folder)
            try:
                self._post_ends(ranks)
                if self.first_error is None and time.monotonic() - looked > _LISTEN_SECONDS:
                    looked = time.monotonic()
                    self._read_error()
            except RuntimeError:
                return  # the store is lost, which the ranks report
            if self.first_error is not None:
                since = since or time.monotonic()
                self._end(self.first_error, ranks, time.monotonic() - since)

    def _read_error(self) -> None:
        if self.first_error is None and self._store.check([ERROR]):
            self.first_error = json.loads(self._store.get(ERROR))

    def _write(self, entry: dict[str, Any]) -> None:
        self.first_error = json.loads(self._store.compare_set(ERROR, "", json.dumps(entry)))

    def _post_ends(self, ranks: list[Rank]) -> None:
        """Post the end of ranks that could not report it, which only their machine sees at once."""
        for rank in ranks:
            code = exit_code(rank.pid)  # before the agent has reaped it, or never
            if code is not None:
                self._codes[rank.number] = code
            if rank.runs or rank.left or rank.number in self._posted or rank.pid == 0:
                continue
            self._posted.add(rank.number)
            code = self._codes.get(rank.number)
            unclear = code is None and (self._stopping() or len(ranks) < self._num_ranks)
            if unclear or (self._stopping() and code == -signal.SIGKILL):
                continue  # it may have obeyed late, or ended because another rank never joined: the agent knows
            if self.first_error is None and code not in (0, StoppedEarly.exit_code, *STOPPED):
                text = how_it_ended(code)
                blames = code is None or code < 0  # killed from outside; otherwise the program ended it
                entry = {"rank": rank.number, "host": socket.gethostname(), "text": text, "blames": blames}
                self._write(entry | {"code": RunError.exit_code if code is None or code < 0 else code})

    def _end(self, first_error: dict[str, Any], ranks: list[Rank], seconds: float) -> None:
        for rank in ranks:
            patience = _OWN_SECONDS if rank.number == first_error["rank"] else _HEARD_SECONDS
            if rank.runs and not rank.left and seconds > patience and rank.number not in self.killed:
                self.killed.add(rank.number)
                with suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL)
        most = _OWN_SECONDS + STUCK_SECONDS + LINGER_SECONDS
        if seconds > most and not any(rank.runs and rank.left for rank in ranks):
            print(f"error: {entry_text(first_error)}", file=sys.stderr, flush=True)
            os._exit(first_error["code"])


def how_it_ended(code: int | None) -> str:
    """Describe the end of a process that did not report it."""
    if code is None:
        return "is gone: its process has ended without a word. If it was killed, `dmesg` there may tell why."
    if code >= 0:
        return f"is gone: its process has ended with exit code {code}. Its own output may tell why."
    hint = ". The system does this when memory runs out; `dmesg` tells" if code == -signal.SIGKILL else ""
    return f"is gone: it was ended by {signal.Signals(-code).name}{hint}"


def exit_code(pid: int) -> int | None:
    """Return the exit code of a child without reaping it; None if it runs, or has been reaped.

    A rank's process id is 0 until it has joined, and waitid(0) would fail.
    """
    found = None
    with suppress(ChildProcessError):
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) if pid else None
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
