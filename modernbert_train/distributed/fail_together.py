"""End all ranks when one fails or hangs: within seconds, with that rank's error, host and exit code.

The other ranks may be inside a collective that waits for the failed one, where no exception can be raised, so they
cannot exit normally. The failed rank writes its error into the rendezvous store; a thread of each rank polls the store,
prints the error and ends its process. heartbeat.py finds ranks that cannot write. This works without a launcher and
without a network between the ranks; launchers like torchrun find the error in the error file they configure.
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
_HEARD_SECONDS = 5.0  # how long a failed rank waits until the others have read its error
ERROR = "modernbert-train/error"  # store key of the error, shared by all ranks and launchers of a run
_HEARD = "modernbert-train/heard"

_here: _Watch | None = None


def is_own(error: Exception) -> bool:
    """Return True if an error concerns this rank only, so that it cannot be caused by a lost rank."""
    return not _may_be_of_network(error)


def show(error: Exception) -> None:
    """Print the traceback of a bug, once: torch may end this process while the others are informed."""
    if isinstance(error, RunError) or getattr(error, "shown", False):
        return
    text = "".join(traceback.format_exception(error))
    print(redact(text), end="", file=sys.stderr, flush=True)
    with suppress(AttributeError):
        error.shown = True  # type: ignore[attr-defined]


def tell_others(error: BaseException) -> None:
    """End all other ranks with this rank's error; a no-op on a single rank or the second time.

    A network error between ranks has its cause elsewhere: find the rank to blame, and end this process with that rank's
    error instead.
    """
    if _here is not None and isinstance(error, Exception) and not isinstance(error, StoppedEarly):
        _here.tell(error)


@contextmanager
def failing_together(timeout_seconds: float = 300.0, store: Any = None) -> Iterator[None]:
    """End all ranks if one raises an error or hangs inside this context; enter it before the first collective.

    Args:
        timeout_seconds: a rank counts as hung if it keeps the others waiting for longer, or is silent for a minute.
        store: the rendezvous store, before the ranks have joined torch's default group.
    """
    global _here
    if store is None and (not dist.is_initialized() or dist.get_world_size() == 1):
        try:
            yield
        except Exception as error:  # raised again; on a single rank, only this one can report it
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
        self._store = store.clone()  # a separate connection: collectives wait on the first one
        self._heartbeat = Heartbeat(self._store, self._rank, self._num_ranks, timeout_seconds, gpu_collectives)
        self._silence = silence_limit(timeout_seconds)
        self._answers = 0  # number of answers from the store
        self._parent = os.getppid()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        # a second thread: the first may block on the store, which can freeze with its process
        threading.Thread(target=self._look_besides, daemon=True).start()

    def stop(self, *, in_order: bool) -> None:
        """Stop watching; if this rank ends in order, slower ranks do not report it as lost."""
        if in_order and not self._over.is_set():
            with suppress(RuntimeError):  # the store has ended, and so have the others
                self._heartbeat.beat(left=True)
        self._over.set()
        self._heartbeat.close()
        self._thread.join(_HEARD_SECONDS)  # bounded: the thread may block on a lost store

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
        # bounded: the store may be frozen, and this error must be printed anyway
        telling = threading.Thread(target=self._tell, args=(self._entry_of(error),), daemon=True)
        telling.start()
        telling.join(2 * _HEARD_SECONDS)
        if telling.is_alive():
            warn(f"the other ranks could not be informed: {self._meets()} does not answer")

    def _tell(self, entry: dict[str, Any]) -> None:
        with errors_to(warn, RuntimeError, before="the other ranks could not be informed: "):
            self._publish(entry)

    def _publish(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Publish an error unless there is one already; return the published one once all ranks had time to read it."""
        text = self._store.compare_set(ERROR, "", json.dumps(entry))
        first: dict[str, Any] = json.loads(text)
        _write_error_file(first)
        deadline = time.monotonic() + _HEARD_SECONDS
        # wait: the store, or the others' connections to it, may end with this process
        with suppress(RuntimeError):  # the store's holder has read the error and ended
            while self._store.add(_HEARD, 0) < self._num_ranks - 1 and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS / 5)
        return first

    def _blame(self, error: Exception) -> dict[str, Any] | None:
        """Return the rank behind a network error; the thread keeps running, so the others see this rank meanwhile."""
        verdict = self._heartbeat.silent(SILENT_SECONDS)
        if verdict is not None:
            return _entry(verdict, RunError.exit_code)
        if not _is_between_ranks(error):
            return None  # another network, such as a bucket's or a logger's
        if not _timed_out(error):
            text = f"lost its connection to another rank, and all of them live: the network between them. {error} "
            return _entry(self._verdict(text + NETWORK)._replace(blames=False), RunError.exit_code)
        verdict = self._heartbeat.behind()
        if verdict is None:
            text = f"a collective waited too long, and no rank is behind the others: {error}"
            verdict = self._verdict(text)._replace(blames=False)  # the network is at fault, not a machine
        return _entry(verdict, HangError.exit_code)

    def _look_besides(self) -> None:
        """Watchdog that works when the store does not answer: checks the store, the launcher, and this process.

        Only for launchers other than ours: with launch/run.py a rank dies with its launcher, see orphans.py. Time
        counts only while this process runs: after a freeze of this process, the store gets its time to answer.
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
                # the store's holder is gone; a rank that is about to end anyway may do so
                if not self._over.wait(GRACE_SECONDS):
                    _end(self._without_store())
                return
            if entry["code"] == HangError.exit_code and entry["rank"] == self._rank:
                faulthandler.dump_traceback(all_threads=True)
            _end(entry)

    def _without_store(self) -> dict[str, Any]:
        """Return the error when the store is gone with its process: rank 0, or the launcher on its machine."""
        if holds_store(0):
            text = f"is gone, or the network to it is lost: it held {self._meets()}."
            verdict = self._heartbeat.first_rank() or Verdict(0, os.environ.get("MASTER_ADDR", "?"), text)
        else:
            text = f"lost the machine {self._meets()}: it, its launcher or the network is gone."
            verdict = self._verdict(text)._replace(blames=False)  # not this machine's fault
        return _entry(verdict, RunError.exit_code)

    def _silent_store(self) -> dict[str, Any]:
        """Return the error when the store's process is frozen, or the connection to it is cut."""
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
            )._replace(blames=False)  # not this machine's fault
        return _entry(verdict, HangError.exit_code)

    def _meets(self) -> str:
        address, port = (os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        return f"{address}:{port}, where the ranks meet"

    def _entry_of(self, error: Exception) -> dict[str, Any]:
        if isinstance(error, RunError):
            rank, host = error.at_fault or (self._rank, socket.gethostname())
            return _entry(Verdict(rank, host, str(error), blames=error.at_fault is not None), error.exit_code)
        message = " ".join(str(error).split())  # CUDA errors have several lines, and the last one is uninformative
        text = f"{type(error).__name__}: {message.rstrip('.')}. Its own output has the traceback."
        return _entry(self._verdict(text)._replace(blames=_is_of_machine(error)), RunError.exit_code)

    def _verdict(self, text: str) -> Verdict:
        return Verdict(self._rank, socket.gethostname(), text)


def holds_store(rank: int) -> bool:
    """Return True if a rank holds the store: rank 0 does, unless the launcher provides one."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        yield cause
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__


def _says(error: BaseException, *words: str) -> bool:
    return any(word in str(cause).lower() for cause in _causes(error) for word in words)


def _may_be_of_network(error: Exception) -> bool:
    """Return True if a lost rank may have caused an error, so that the heartbeats should be checked."""
    if isinstance(error, RunError):  # its text already names the cause
        return False
    if _is_between_ranks(error) or any(isinstance(cause, OSError | EOFError) for cause in _causes(error)):
        return True
    return _says(error, "connection", "timed out", "timeout", "broken pipe", "socket")


def _is_between_ranks(error: Exception) -> bool:
    """Return True for errors of the network between ranks: torch's own, and gloo's, which are untyped."""
    if any(isinstance(cause, dist.DistError) and not _is_own(str(cause)) for cause in _causes(error)):
        return True
    return _says(error, "gloo", "recvbytes", "sendbytes", "recvvalue")


def _is_own(text: str) -> bool:
    """Return True if an NCCL error concerns this machine: two ranks on a GPU, no memory, a full /dev/shm.

    NCCL's kind of a system error is uninformative ("e.g. socket, malloc"), so only its last error is read.
    """
    if "nccl" not in text.lower() or "ncclRemoteError" in text or _TIMED_OUT.search(text):
        return False
    *_, last = text.split("Last error:")
    return "ncclSystemError" not in text or _OF_SYSTEM.search(last) is not None or not _OF_NETWORK.search(last)


def _is_of_machine(error: Exception) -> bool:
    """Return True if this machine's hardware may have caused an error; schedulers then exclude it at the next start.

    Most errors are of the program, its data or its settings and would occur on any machine; a healthy machine should
    not be excluded.
    """
    texts = [str(cause) for cause in _causes(error)]
    return any(_OF_MACHINE.search(text) for text in texts) and not any(_OF_PROGRAM.search(text) for text in texts)


_OF_MACHINE = re.compile("CUDA error|CUDA failure|CUBLAS_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR)|NCCL error", re.I)
# also CUDA and NCCL errors: a wrong index or address, a kernel that does not fit, no memory, another rank's abort
_OF_PROGRAM = re.compile("assert|illegal mem|misaligned|invalid|no kernel image|(out of|allocate) mem|abort", re.I)
_TIMED_OUT = re.compile("timed out|timeout", re.I)
_OF_SYSTEM = re.compile("shm|no space|memory|too many open files", re.I)
_OF_NETWORK = re.compile(r"socket|connect|recv|send|peer|route|NET/|ibv_|\bIB\b", re.I)


def _timed_out(error: Exception) -> bool:
    return _says(error, "timed out", "timeout")


def _entry(verdict: Verdict, code: int) -> dict[str, Any]:
    return {**verdict._asdict(), "code": code}


def entry_text(entry: dict[str, Any]) -> str:
    """Return an error as printed; a launcher's lacks a rank, and its text names the machine."""
    return f"rank {entry['rank']} on {entry['host']}: {entry['text']}" if entry["rank"] is not None else entry["text"]


def _write_error_file(entry: dict[str, Any]) -> None:
    """Write the error file for the launcher: torchrun's agent reads `message` and `timestamp` from it.

    launch/ranks.py reads `code` too, for agents that cannot finish.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        message = entry_text(entry)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": message, "timestamp": int(time.time()), "code": entry["code"]}, file)


def _end(entry: dict[str, Any]) -> None:
    """End this process with another rank's error."""
    _write_error_file(entry)
    print(f"error: {entry_text(entry)}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(entry["code"])
