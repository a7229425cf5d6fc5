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
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from modernbert_train.core.files import errors_to, warn
from modernbert_train.core.redact import redact
from modernbert_train.core.torch_internals import default_store, gpu_collectives
from modernbert_train.distributed.heartbeat import (
    GRACE_SECONDS,
    NETWORK,
    SILENT_SECONDS,
    Heartbeat,
    Verdict,
    silence_limit,
)
from modernbert_train.distributed.launched import note_blamed
from modernbert_train.errors import HangError, RunError, StoppedEarly

_LOOK_SECONDS = 0.5
_HEARD_SECONDS = 5.0  # how long a failed rank waits for the others to have read its error
ERROR = "modernbert-train/error"  # in the store, of all ranks and launchers of a run
_HEARD = "modernbert-train/heard"

_here: _Watch | None = None


def is_own(error: Exception) -> bool:
    """Whether an error is this rank's alone: no lost rank can be behind it."""
    return not _may_be_of_network(error)


def show(error: Exception) -> None:
    """Print the traceback of a bug, once: while the others are told of it, torch may end this process."""
    if isinstance(error, RunError) or getattr(error, "shown", False):
        return
    text = "".join(traceback.format_exception(error))
    print(redact(text), end="", file=sys.stderr, flush=True)
    with suppress(AttributeError):
        error.shown = True  # type: ignore[attr-defined]


def tell_others(error: BaseException) -> None:
    """Have all other ranks end with an error of this one; does nothing on a single rank or a second time.

    An error of the network between the ranks has its cause elsewhere: the rank that is to blame is then looked for,
    and this process ends here with that rank's error instead.
    """
    if _here is not None and isinstance(error, Exception) and not isinstance(error, StoppedEarly):
        _here.tell(error)


@contextmanager
def failing_together(timeout_seconds: float = 300.0, store: Any = None) -> Iterator[None]:
    """From the first collective on: an error that leaves this block on one of them ends all, as does a hang.

    Args:
        timeout_seconds: a rank that keeps the others waiting for longer hangs, as does one that is silent for a minute.
        store: where the ranks meet, if they have not yet joined torch's default group.
    """
    global _here
    if store is None and (not dist.is_initialized() or dist.get_world_size() == 1):
        try:
            yield
        except Exception as error:  # raised again; nobody else could tell the job
            if _is_of_machine(error):
                note_blamed(socket.gethostname())
            raise
        return
    _here = _Watch(store or default_store(), timeout_seconds)
    in_order = False
    try:
        yield
        in_order = True
    except StoppedEarly:
        in_order = True
        raise
    except BaseException as error:  # raised again
        tell_others(error)
        raise
    finally:
        _here.stop(in_order=in_order)
        _here = None


class _Watch:
    def __init__(self, store: Any, timeout_seconds: float) -> None:
        self._rank, self._num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._store = store.clone()  # a connection of its own: collectives wait on the first one
        self._heartbeat = Heartbeat(self._store, self._rank, self._num_ranks, timeout_seconds, gpu_collectives)
        self._silence = silence_limit(timeout_seconds)
        self._answers = 0  # how often the store has answered
        self._parent = os.getppid()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        # a thread of its own: the other one may wait for the store, which can freeze with its process
        threading.Thread(target=self._look_besides, daemon=True).start()

    def stop(self, *, in_order: bool) -> None:
        """End the watch; a rank that ends in order is not missed by those that take longer."""
        if in_order and not self._over.is_set():
            with suppress(RuntimeError):  # the store has ended, and so have the others
                self._heartbeat.beat(left=True)
        self._over.set()
        self._heartbeat.close()
        self._thread.join(_HEARD_SECONDS)  # not for ever: the thread may wait for a store that is lost

    def tell(self, error: Exception) -> None:
        if self._over.is_set():
            return
        try:
            entry = self._blame(error) if _may_be_of_network(error) else None
            if entry is not None:
                entry = self._publish(entry)
                _end(entry)
        except RuntimeError:
            _end(self._without_store())
        show(error)
        self.stop(in_order=False)
        # not for ever: the store may be frozen, and this error is to be told all the same
        telling = threading.Thread(target=self._tell, args=(self._entry_of(error),), daemon=True)
        telling.start()
        telling.join(2 * _HEARD_SECONDS)
        if telling.is_alive():
            warn(f"the other ranks could not be informed: {self._meets()} does not answer")

    def _tell(self, entry: dict[str, Any]) -> None:
        with errors_to(warn, RuntimeError, before="the other ranks could not be informed: "):
            self._publish(entry)

    def _publish(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Write an error for all ranks unless there is one, and return the one that counts, once it has been read."""
        text = self._store.compare_set(ERROR, "", json.dumps(entry))
        first: dict[str, Any] = json.loads(text)
        _write_error_file(first)
        deadline = time.monotonic() + _HEARD_SECONDS
        # the store, or the connections of the others, may end with this process: not before they have read
        with suppress(RuntimeError):  # who held it has read, and ended
            while self._store.add(_HEARD, 0) < self._num_ranks - 1 and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS / 5)
        return first

    def _blame(self, error: Exception) -> dict[str, Any] | None:
        """The rank behind an error of the network; the thread goes on, so that the others hear this one meanwhile."""
        verdict = self._heartbeat.silent(SILENT_SECONDS)
        if verdict is not None:
            return _entry(verdict, RunError.exit_code)
        if not _is_between_ranks(error):
            return None  # another network: a bucket, a logger
        if not _timed_out(error):
            text = f"lost its connection to another rank, and all of them live: the network between them. {error} "
            return _entry(self._verdict(text + NETWORK)._replace(blames=False), RunError.exit_code)
        verdict = self._heartbeat.behind()
        if verdict is None:
            text = f"a collective waited too long, and no rank is behind the others: {error}"
            verdict = self._verdict(text)._replace(blames=False)  # the network, and no machine
        return _entry(verdict, HangError.exit_code)

    def _look_besides(self) -> None:
        """What needs no answer of the store: that it answers, the launcher's look at this process, and the launcher.

        Launchers of others, that is; with launch/run.py a rank dies by itself, see orphans.py. Time is counted while
        this process runs: after it was frozen itself, the store has its chance to answer.
        """
        heard, waited, last = 0, 0.0, time.monotonic()
        while not self._over.wait(_LOOK_SECONDS):
            self._heartbeat.touch()
            if os.getppid() != self._parent:
                print("error: the launcher of this rank is gone; it ends with it", file=sys.stderr, flush=True)
                os._exit(RunError.exit_code)
            now, answers = time.monotonic(), self._answers
            waited = waited + min(now - last, 2 * _LOOK_SECONDS) if answers == heard else 0.0
            heard, last = answers, now
            if waited > self._silence:
                _end(self._silent_store())

    def _look(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            try:
                self._heartbeat.beat()
                failed = self._store.check([ERROR])
                self._answers += 1
                if not failed:
                    verdict = self._heartbeat.verdict()
                    if verdict is None:
                        continue
                    code = RunError.exit_code if verdict.text.startswith("is gone") else HangError.exit_code
                    self._store.compare_set(ERROR, "", json.dumps(_entry(verdict, code)))
                entry = json.loads(self._store.get(ERROR))
                self._store.add(_HEARD, 1)
            except RuntimeError:
                # its holder is gone; a rank that is about to end anyway may do so
                if not self._over.wait(GRACE_SECONDS):
                    _end(self._without_store())
                return
            if entry["code"] == HangError.exit_code and entry["rank"] == self._rank:
                faulthandler.dump_traceback(all_threads=True)
            _end(entry)

    def _without_store(self) -> dict[str, Any]:
        """The error when the store is gone with the process that held it: rank 0, or the launcher on its machine."""
        if holds_store(0):
            text = f"is gone, or the network to it is lost: it held {self._meets()}."
            verdict = self._heartbeat.first_rank() or Verdict(0, os.environ.get("MASTER_ADDR", "?"), text)
        else:
            text = f"lost the machine {self._meets()}: it, its launcher or the network is gone."
            verdict = self._verdict(text)._replace(blames=False)  # not this machine
        return _entry(verdict, RunError.exit_code)

    def _silent_store(self) -> dict[str, Any]:
        """The error when the store's process is there and frozen, or the way to it is cut."""
        host = self._heartbeat.first_host() or os.environ.get("MASTER_ADDR", "?")
        silence = f"no answer for {self._silence:g} s"
        if holds_store(0):
            verdict = Verdict(
                0,
                host,
                f"hangs: it holds {self._meets()}, and there was {silence}. Its process is frozen, or its machine or "
                "network is lost. Start again, without that machine if it comes again.",
            )
        else:
            verdict = self._verdict(
                f"{self._meets()}: {silence}. That machine ({host}, with rank 0) or its launcher is frozen, or the "
                "network between it and this one is lost. Start again, without that machine if it comes again."
            )._replace(blames=False)  # not this machine
        return _entry(verdict, HangError.exit_code)

    def _meets(self) -> str:
        address, port = (os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        return f"{address}:{port}, where the ranks meet"

    def _entry_of(self, error: Exception) -> dict[str, Any]:
        if isinstance(error, RunError):
            rank, host = error.at_fault or (self._rank, socket.gethostname())
            return _entry(Verdict(rank, host, str(error), blames=error.at_fault is not None), error.exit_code)
        said = " ".join(str(error).split())  # torch's errors of CUDA have several lines, and the last one says nothing
        text = f"{type(error).__name__}: {said.rstrip('.')}. Its own output has the traceback."
        return _entry(self._verdict(text)._replace(blames=_is_of_machine(error)), RunError.exit_code)

    def _verdict(self, text: str) -> Verdict:
        return Verdict(self._rank, socket.gethostname(), text)


def holds_store(rank: int) -> bool:
    """Whether a rank holds the store: rank 0 does, unless the launcher has one for it."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and those that led to it."""
    found: BaseException | None = error
    seen: set[int] = set()
    while found is not None and id(found) not in seen:
        yield found
        seen.add(id(found))
        found = found.__cause__ or found.__context__


def _says(error: BaseException, *words: str) -> bool:
    return any(word in str(cause).lower() for cause in _causes(error) for word in words)


def _may_be_of_network(error: Exception) -> bool:
    """Whether a lost rank may be behind an error: it is worth the time to ask."""
    if isinstance(error, RunError):  # it says itself what is wrong
        return False
    if _is_between_ranks(error) or any(isinstance(cause, OSError | EOFError) for cause in _causes(error)):
        return True
    return _says(error, "connection", "timed out", "timeout", "broken pipe", "socket")


def _is_between_ranks(error: Exception) -> bool:
    """Whether it is certainly of the network between the ranks: torch's own errors, and gloo's, which have no type."""
    if any(isinstance(cause, dist.DistError) and not _is_own(str(cause)) for cause in _causes(error)):
        return True
    return _says(error, "gloo", "recvbytes", "sendbytes", "recvvalue")


def _is_own(text: str) -> bool:
    """Whether an error of NCCL's is of this machine: two ranks on a GPU, no memory, no room in /dev/shm.

    Of a system's error its kind says nothing ("e.g. socket, malloc"), so the last words count.
    """
    if "nccl" not in text.lower() or "ncclRemoteError" in text or _TIMED_OUT.search(text):
        return False
    *_, last = text.split("Last error:")
    return "ncclSystemError" not in text or _OF_SYSTEM.search(last) is not None or not _OF_NETWORK.search(last)


def _is_of_machine(error: Exception) -> bool:
    """Whether this machine may be to blame for an error of its own: a scheduler then leaves it out at the next start.

    Most are of the program, its data or its settings, would come on any machine, and a healthy one would be missed.
    """
    texts = [str(cause) for cause in _causes(error)]
    return any(_OF_MACHINE.search(text) for text in texts) and not any(_OF_PROGRAM.search(text) for text in texts)


_OF_MACHINE = re.compile("CUDA error|CUDA failure|CUBLAS_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR)|NCCL error", re.I)
# of CUDA's and NCCL's too: a wrong index or address, a kernel that does not fit, no memory, the end of another rank
_OF_PROGRAM = re.compile("assert|illegal mem|misaligned|invalid|no kernel image|(out of|allocate) mem|abort", re.I)
_TIMED_OUT = re.compile("timed out|timeout", re.I)
_OF_SYSTEM = re.compile("shm|no space|memory|too many open files", re.I)
_OF_NETWORK = re.compile(r"socket|connect|recv|send|peer|route|NET/|ibv_|\bIB\b", re.I)


def _timed_out(error: Exception) -> bool:
    return _says(error, "timed out", "timeout")


def _entry(verdict: Verdict, code: int) -> dict[str, Any]:
    return {**verdict._asdict(), "code": code}


def entry_text(entry: dict[str, Any]) -> str:
    """An error as it is told; a launcher's has no rank of its own, and names it itself."""
    return f"rank {entry['rank']} on {entry['host']}: {entry['text']}" if entry["rank"] is not None else entry["text"]


def _write_error_file(entry: dict[str, Any]) -> None:
    """For the launcher: torch's elastic agent names this file and reads `message` and `timestamp` from it.

    launch/ranks.py reads `code` too, where the agent cannot come to its end.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        message = entry_text(entry)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": message, "timestamp": int(time.time()), "code": entry["code"]}, file)


def _end(entry: dict[str, Any]) -> None:
    """End this process with an error of another rank."""
    _write_error_file(entry)
    print(f"error: {entry_text(entry)}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(entry["code"])
