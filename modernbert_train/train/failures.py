"""One rank fails or hangs, all ranks end: within seconds, with that rank's error, its host and its exit code.

The others may be inside a collective that waits for the failed rank, where nothing can raise, so they cannot end in
order. The failed rank writes its error into the store that the ranks met in; a thread of each rank looks there, prints
the error and ends its process. That of a rank that cannot write is found by heartbeat.py. This needs neither a launcher
nor a working network between the ranks; a launcher of torch's kind finds the error in the file it asks for.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from modernbert_train.errors import HangError, RunError, StoppedEarly
from modernbert_train.train.heartbeat import GRACE_SECONDS, Heartbeat, Verdict

_LOOK_SECONDS = 0.5
_HEARD_SECONDS = 5.0  # how long a failed rank waits for the others to have read its error
_LOST_SECONDS = 4.0  # a rank silent for so long after a broken connection is the one that broke it
_ERROR, _HEARD = "modernbert-train/error", "modernbert-train/heard"

_here: _Watch | None = None


def tell_others(error: BaseException) -> None:
    """Have all other ranks end with an error of this one; does nothing on a single rank or a second time.

    An error of the network between the ranks has its cause elsewhere: the rank that is to blame is then looked for,
    and this process ends here with that rank's error instead.
    """
    if _here is not None and isinstance(error, Exception) and not isinstance(error, StoppedEarly):
        _here.tell(error)


@contextmanager
def failing_together(timeout_seconds: float = 300.0) -> Iterator[None]:
    """While the ranks are joined: an error that leaves this block on one of them ends all, and so does a hang.

    Args:
        timeout_seconds: a rank that is silent, or keeps the others waiting, for longer hangs.
    """
    global _here
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    _here = _Watch(timeout_seconds)
    try:
        yield
    except BaseException as error:
        tell_others(error)
        raise
    finally:
        _here.stop()
        _here = None


class _Watch:
    def __init__(self, timeout_seconds: float) -> None:
        store: Any = dist.distributed_c10d._get_default_store()  # torch's types lack clone()
        self._store = store.clone()  # a connection of its own: collectives wait on the first one
        self._heartbeat = Heartbeat(self._store, dist.get_rank(), dist.get_world_size(), timeout_seconds)
        self._parent = os.getppid()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        # a thread of its own: the other one may wait for the store, which torchrun's launcher takes along
        threading.Thread(target=self._look_at_parent, daemon=True).start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(_HEARD_SECONDS)  # not for ever: the thread may wait for a store that is lost

    def tell(self, error: Exception) -> None:
        if self._over.is_set():
            return
        try:
            entry = self._blame(error) if _is_of_network(error) else None
            if entry is not None:
                entry = self._publish(entry)
                _end(entry)
            self.stop()
            self._publish(_entry_of(error))
        except RuntimeError as lost:
            print(f"warning: the other ranks could not be told: {lost}", file=sys.stderr)

    def _publish(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Write an error for all ranks unless there is one, and return the one that counts, once it has been read."""
        text = self._store.compare_set(_ERROR, "", json.dumps(entry))
        first: dict[str, Any] = json.loads(text)
        _write_error_file(first)
        deadline = time.monotonic() + _HEARD_SECONDS
        # the store, or the connections of the others, may end with this process: not before they have read
        while self._store.add(_HEARD, 0) < dist.get_world_size() - 1 and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS / 5)
        return first

    def _blame(self, error: Exception) -> dict[str, Any] | None:
        """The rank behind an error of the network; the thread goes on, so that the others hear this one meanwhile."""
        verdict = self._heartbeat.silent(_LOST_SECONDS)
        if verdict is not None:
            return _entry(verdict, RunError.exit_code)
        if "timed out" not in str(error).lower():
            return None
        verdict = self._heartbeat.behind()
        if verdict is None:
            text = f"a collective waited too long, and no rank is behind the others: {error}"
            verdict = Verdict(dist.get_rank(), socket.gethostname(), text)
        return _entry(verdict, HangError.exit_code)

    def _look_at_parent(self) -> None:
        """Launchers of others; with launch/run.py a rank dies by itself, see orphans.py."""
        while not self._over.wait(_LOOK_SECONDS):
            if os.getppid() != self._parent:
                print("error: the launcher of this rank is gone; it ends with it", file=sys.stderr, flush=True)
                os._exit(RunError.exit_code)

    def _look(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            try:
                self._heartbeat.beat()
                if not self._store.check([_ERROR]):
                    verdict = self._heartbeat.verdict()
                    if verdict is None:
                        continue
                    self._store.compare_set(_ERROR, "", json.dumps(_entry(verdict, HangError.exit_code)))
                entry = json.loads(self._store.get(_ERROR))
                self._store.add(_HEARD, 1)
            except RuntimeError:
                self._lost_store()
                return
            if entry["code"] == HangError.exit_code and entry["rank"] == dist.get_rank():
                faulthandler.dump_traceback(all_threads=True)
            _end(entry)

    def _lost_store(self) -> None:
        """The store is gone with the process that held it; a rank that is about to end anyway may do so."""
        if self._over.wait(GRACE_SECONDS):
            return
        place = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        text = f"lost the machine {place}, where the ranks meet: it, its launcher or the network is gone."
        _end(_entry(Verdict(dist.get_rank(), socket.gethostname(), text), RunError.exit_code))


def _is_of_network(error: Exception) -> bool:
    words = ("gloo", "nccl", "connection", "timed out")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def _entry_of(error: Exception) -> dict[str, Any]:
    if isinstance(error, RunError):
        code, text = error.exit_code, str(error)
    else:
        code, text = RunError.exit_code, f"{type(error).__name__}: {error}. Its own output has the traceback."
    return _entry(Verdict(dist.get_rank(), socket.gethostname(), text), code)


def _entry(verdict: Verdict, code: int) -> dict[str, Any]:
    return {"rank": verdict.rank, "host": verdict.host, "code": code, "text": verdict.text}


def _write_error_file(entry: dict[str, Any]) -> None:
    """For the launcher: torch's elastic agent names this file and reads `message` and `timestamp` from it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        message = f"rank {entry['rank']} on {entry['host']}: {entry['text']}"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": message, "timestamp": int(time.time())}, file)


def _end(entry: dict[str, Any]) -> None:
    """End this process with an error of another rank."""
    _write_error_file(entry)
    print(f"error: rank {entry['rank']} on {entry['host']}: {entry['text']}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(entry["code"])
