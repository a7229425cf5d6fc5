"""Watch this machine's ranks, and exchange with the other launchers how ranks ended.

A killed rank cannot report its end, a frozen one obeys no signal, and one that is blocked in a CUDA call may not read
another's error. The launcher does no computation, so it can always watch and kill. It uses the ranks' rendezvous store,
and the key under which they post an error (fail_together.py).
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
from typing import Any, NoReturn

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # its types forget them

from launch.rendezvous import LINGER_SECONDS, warn_unanswered
from launch.topology import Topology
from modernbert_train.core.read_json import read_json
from modernbert_train.distributed.fail_together import ERROR, entry_text
from modernbert_train.distributed.group import STORE_PREFIX
from modernbert_train.distributed.heartbeat import is_running, silence_limit
from modernbert_train.distributed.launched import LEFT
from modernbert_train.distributed.stop_signals import STOP_SIGNALS
from modernbert_train.errors import HangError, RunError, StoppedEarly

STUCK_SECONDS = 15.0  # after a kill the agent ends sooner, unless it waits for a machine that is cut off
ANSWER_SECONDS = 6.0  # once all ranks have ended, a launcher ends sooner, unless the store does not answer
FROZEN_MARGIN_SECONDS = 5.0  # the launcher waits longer by this, so that running ranks report a frozen one first
NO_SIGN_OF_LIFE = "gave no sign of life and was killed: it was frozen, or cut off from the others"
_FROZEN_LOOK_SECONDS = 1.0
_LOOK_SECONDS = 0.05  # the agent polls exit codes every 0.1 s
_LISTEN_SECONDS = 0.5
_HEARD_SECONDS = 5.0  # a rank reads another's error within a second; after this time it is killed
_OWN_SECONDS = 30.0  # for the rank that posted the error: the agent's own grace period
STOPPED = tuple(-number for number in STOP_SIGNALS)  # exit codes before Python could handle the signal


class Rank:
    """A rank of this machine, read from its heartbeat file: `NUMBER` contains its process id."""

    def __init__(self, file: Path) -> None:
        pid, _, state = file.read_text(encoding="utf-8").partition(" ")
        self.number, self.pid, self.left = int(file.name), int(pid or 0), state == LEFT
        self.runs = self.pid != 0 and is_running(self.pid)


def ranks_in(folder: Path) -> list[Rank]:
    """Return the ranks of this machine that have joined the others."""
    return [Rank(file) for file in sorted(folder.iterdir())]


class RankWatch:
    """Watchdog of this machine's ranks, active from before they start until their launcher ends.

    One thread looks at the ranks and never waits for the network. It kills ranks that give no sign of life, and ranks
    that do not react to an error of another rank; torch's agent then ends the others. If the agent itself waits without
    a limit, for a store or a machine that does not answer, the thread ends this process. A second thread exchanges
    errors with the rendezvous store, on which it may block.

    Args:
        folder: of the ranks' heartbeat files.
        timeout_seconds: of the run; see heartbeat.py.
        topology: this machine among the others.
        stopping: True once a signal has requested a stop.

    Attributes:
        first_error: the first error of any rank of the run; None without any.
        deaf: ranks that were killed because they did not react to it.
        frozen: ranks that were killed because they gave no sign of life.
        holds_store: True if this machine holds the store; then it answers, and the others need it for a while.
        finished_at: time at which all ranks were first seen finished; None before, and after the agent has returned.
    """

    def __init__(self, folder: Path, timeout_seconds: float, topology: Topology, stopping: Callable[[], bool]) -> None:
        self.first_error: dict[str, Any] | None = None
        self.deaf: set[int] = set()
        self.frozen: set[int] = set()
        self.holds_store = False
        self.finished_at: float | None = None
        self._folder, self._topology, self._stopping = folder, topology, stopping
        self._seconds = silence_limit(timeout_seconds) + FROZEN_MARGIN_SECONDS  # longest time without a heartbeat
        self._seconds_to_end = timeout_seconds + FROZEN_MARGIN_SECONDS  # the same for a rank that has left the others
        self._seen: dict[int, tuple[int, float]] = {}  # time of the last heartbeat, and time when it was seen
        self._codes: dict[int, int] = {}
        self._judged: set[int] = set()  # ranks that have ended
        self._outbox: list[dict[str, Any]] = []
        self._failed_at: float | None = None  # time at which `first_error` was first seen
        self._ended_at: float | None = None  # time at which all ranks were first seen ended, with an error reported
        self._killed_at = 0.0  # time at which the last frozen rank was killed
        self._store: Any = None
        self._disconnected, self._over = threading.Event(), threading.Event()
        self._exchange = threading.Thread(target=self._exchange_errors, daemon=True)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def connect(self, store: TCPStore) -> None:
        """Exchange errors with the others from now on, through the ranks' rendezvous store."""
        self._store = PrefixStore(STORE_PREFIX, store.clone())  # type: ignore[attr-defined]
        self._exchange.start()

    def disconnect(self) -> None:
        """End the exchange of errors, after the ranks have ended."""
        if self._store is None or self._disconnected.is_set():
            return
        self._disconnected.set()
        self._exchange.join(2 * _HEARD_SECONDS)  # not for ever: the store may be frozen
        if not self._exchange.is_alive():
            with suppress(RuntimeError):  # the store is lost, and so are its readers
                self._post()
                self._read_error()

    def post_outcome(self, code: int, message: str, *, blames: bool) -> None:
        """Post how this machine's ranks ended, and whether that may be its fault, unless an error was posted before."""
        if self.first_error is None and not self._exchange.is_alive():
            with suppress(RuntimeError):
                host = socket.gethostname()
                self._write({"rank": None, "host": host, "text": message, "blames": blames, "code": code})

    def finish(self) -> None:
        """Record that the agent has seen all ranks of this machine finish."""
        self.finished_at = time.monotonic()

    def stop(self) -> None:
        self.disconnect()
        self._over.set()
        self._thread.join()

    def _exchange_errors(self) -> None:
        looked = 0.0
        while not self._disconnected.wait(_LOOK_SECONDS):
            try:
                self._post()
                if self.first_error is None and time.monotonic() - looked > _LISTEN_SECONDS:
                    looked = time.monotonic()
                    self._read_error()
            except RuntimeError:
                return  # the store is lost, which the ranks report

    def _post(self) -> None:
        while self._outbox and self.first_error is None:
            self._write(self._outbox.pop(0))

    def _read_error(self) -> None:
        if self.first_error is None and self._store.check([ERROR]):
            self.first_error = json.loads(self._store.get(ERROR))

    def _write(self, entry: dict[str, Any]) -> None:
        self.first_error = json.loads(self._store.compare_set(ERROR, "", json.dumps(entry)))

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._over.wait(_LOOK_SECONDS):
            ranks = ranks_in(self._folder)
            if self._store is not None and not self._disconnected.is_set():
                self._note_ends(ranks)
                if self.first_error is not None:
                    self._end_deaf(self.first_error, ranks)
            if time.monotonic() - looked > _FROZEN_LOOK_SECONDS:
                looked = time.monotonic()
                self._end_stuck(ranks)
                self._end_frozen(ranks)

    def _note_ends(self, ranks: list[Rank]) -> None:
        """Report the end of ranks that could not report it, which only their machine sees at once."""
        for rank in ranks:
            code = exit_code(rank.pid)  # before the agent has reaped it, or never
            if code is not None:
                self._codes[rank.number] = code
            if rank.runs or rank.left or rank.number in self._judged or rank.pid == 0:
                continue
            self._judged.add(rank.number)
            code = self._codes.get(rank.number)
            unclear = code is None and (self._stopping() or len(ranks) < self._topology.ranks_per_node)
            if unclear or (self._stopping() and code == -signal.SIGKILL):
                continue  # it may have obeyed late, or ended because another rank never joined: the agent knows
            if code not in (0, StoppedEarly.exit_code, *STOPPED):
                text = how_it_ended(code)
                blames = code is None or code < 0  # killed from outside; otherwise the program ended it
                entry = {"rank": rank.number, "host": socket.gethostname(), "text": text, "blames": blames}
                self._outbox.append(entry | {"code": RunError.exit_code if code is None or code < 0 else code})

    def _end_deaf(self, first_error: dict[str, Any], ranks: list[Rank]) -> None:
        """Kill ranks that do not react to an error; end the launcher if its agent does not end after that."""
        self._failed_at = self._failed_at or time.monotonic()
        seconds = time.monotonic() - self._failed_at
        for rank in ranks:
            patience = _OWN_SECONDS if rank.number == first_error["rank"] else _HEARD_SECONDS
            if rank.runs and not rank.left and seconds > patience and rank.number not in self.deaf:
                self.deaf.add(rank.number)
                with suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL)
        most = _OWN_SECONDS + STUCK_SECONDS + LINGER_SECONDS
        if seconds > most and not any(rank.runs and rank.left for rank in ranks):
            _exit(first_error["code"], f"error: {entry_text(first_error)}")

    def _end_stuck(self, ranks: list[Rank]) -> None:
        """End the launcher some seconds after all ranks have ended, if its agent still waits for the store."""
        errors = [] if not ranks or any(rank.runs for rank in ranks) else self._errors()
        self._ended_at = (self._ended_at or time.monotonic()) if errors else None
        patience = STUCK_SECONDS + LINGER_SECONDS if self.holds_store else ANSWER_SECONDS
        if self._ended_at is not None and time.monotonic() - self._ended_at > patience:
            first = min(errors, key=lambda each: each["timestamp"])
            _exit(first["code"], f"error: {first['message']}")
        if ranks and all(not rank.runs and exit_code(rank.pid) == 0 for rank in ranks):
            self.finished_at = self.finished_at or time.monotonic()  # before the agent has seen it
        finished = self.finished_at
        if finished is not None and time.monotonic() - finished > STUCK_SECONDS and not self.holds_store:
            warn_unanswered(self._topology)
            os._exit(0)

    def _end_frozen(self, ranks: list[Rank]) -> None:
        """Kill ranks that give no sign of life; then end the launcher, if it waits for a machine that is cut off."""
        for rank in ranks:
            touched, now = (self._folder / str(rank.number)).stat().st_mtime_ns, time.monotonic()
            limit = self._seconds_to_end if rank.left else self._seconds
            if self._seen.get(rank.number, (0, 0.0))[0] != touched:
                self._seen[rank.number] = (touched, now)
            elif now - self._seen[rank.number][1] < limit or not rank.runs or rank.number in self.frozen:
                continue
            elif rank.pid in rank_processes():
                self.frozen.add(rank.number)
                self._killed_at = now
                os.kill(rank.pid, signal.SIGKILL)
        if self.frozen and time.monotonic() - self._killed_at > STUCK_SECONDS:
            for pid in rank_processes():
                os.kill(pid, signal.SIGKILL)
            numbers = ", ".join(map(str, sorted(self.frozen)))
            _exit(HangError.exit_code, f"error: rank {numbers} on {socket.gethostname()} {NO_SIGN_OF_LIFE}")

    def _errors(self) -> list[dict[str, Any]]:
        """Read the errors that this machine's ranks have ended with; see fail_together.py."""
        errors = []
        for path in self._folder.parent.rglob("error.json"):
            with suppress(OSError, ValueError):  # being written
                errors.append(read_json(path))
        return [each for each in errors if isinstance(each, dict) and {"message", "code", "timestamp"} <= each.keys()]


def _exit(code: int, message: str) -> NoReturn:
    """End this process at once, although its other threads may wait for the store."""
    print(message, file=sys.stderr, flush=True)
    os._exit(code)


def rank_processes() -> list[int]:
    """Return the ranks among this process's children: the agent starts each in a new session."""
    sessions = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended since
            _, _, status = path.read_text(encoding="utf-8", errors="replace").rpartition(")")
            parent, session = int(status.split()[1]), int(status.split()[3])
            if parent == os.getpid() and session == int(path.parent.name):
                sessions.append(session)
    return sessions


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
    ended = None
    with suppress(ChildProcessError):
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) if pid else None
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
