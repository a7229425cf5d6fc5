"""Run commands in forks of this process, which has imported everything: a start takes milliseconds instead of seconds.

A fork runs the code of `python -m modernbert_train ...` or `python launch/run.py ...` from the line after the imports
on, with its own signals, working directory, environment and files; a launcher's ranks are forks of the launcher instead
of new interpreters. Everything else is real: the process tree, which processes die together, exit codes, output. A fork
is only safe in a single-threaded process that has computed nothing, which `prepare` checks.

This process adopts orphans, so that no leftover process is overlooked.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

Hook = Callable[[], object]  # called in a fork before its program starts; its children inherit the effect
_ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h
_NEW_MOUNTS, _NEW_NAMES = 0x00020000, 0x04000000  # CLONE_NEWNS, CLONE_NEWUTS of linux/sched.h


def prepare() -> None:
    """Import everything a run needs, and adopt orphans; call it once, before the first start."""
    import launch.run  # noqa: F401
    import modernbert_train.__main__
    import modernbert_train.train.session
    import modernbert_train.weights.export  # noqa: F401

    assert threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1, "forks need a single thread"
    ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1)


def private_mounts() -> str | None:
    """Give this process private mounts, with an empty /dev/shm; return the reason if that is impossible, or None."""
    if error := unshare(_NEW_MOUNTS):
        return error
    for words in (["--make-rprivate", "/"], ["-t", "tmpfs", "shm", "/dev/shm"]):
        done = subprocess.run(["mount", *words], capture_output=True, text=True)
        if done.returncode != 0:
            return done.stderr.strip()
    return None


def unshare(what: int) -> str | None:
    """Leave a namespace; return the reason if that fails, or None."""
    library = ctypes.CDLL(None, use_errno=True)
    return None if library.unshare(what) == 0 else os.strerror(ctypes.get_errno())


def another_host(name: str) -> None:
    """Hook: run the program on a host of this name."""
    if error := unshare(_NEW_NAMES):
        raise OSError(error)
    encoded = name.encode()
    ctypes.CDLL(None).sethostname(encoded, len(encoded))


class Forked:
    """A child of this process; replaces subprocess.Popen in torch's launcher.

    Attributes:
        pid: its process id.
        returncode: None while it runs; negative if a signal ended it.
    """

    def __init__(self, program: Callable[[], int]) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _run(program)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked program", timeout or 0)
            time.sleep(0.002)
        return code


def _run(program: Callable[[], int]) -> None:
    """Run the program in the fork until the process exits."""
    code = 70
    try:
        tempfile.tempdir = None  # look it up again in this process's environment
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = program()  # verbs run their exit handlers and end the process themselves
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def start(
    words: Sequence[str], output: Path, *, ranks: int = 1, environment: Mapping[str, str] | None = None, hook: Hook
) -> Forked:
    """Start `python -m modernbert_train WORDS`, or with several ranks `python launch/run.py WORDS[1:] --ranks N`.

    Args:
        words: the verb and its arguments.
        output: file for its output.
        ranks: processes that train.
        environment: variables that differ from this process's.
        hook: called first, in the forked process.
    """

    def program() -> int:
        os.setsid()
        _print_to(output)
        os.environ.update(environment or {})
        hook()
        if ranks == 1:
            return _verb(words)
        return _launcher([*words[1:], "--ranks", str(ranks)])

    return Forked(program)


def _print_to(output: Path) -> None:
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


def _verb(words: Sequence[str]) -> int:
    from modernbert_train import __main__
    from modernbert_train.distributed import stop_signals

    stop_signals.take_over()
    sys.argv = [str(__main__.__file__), *words]
    __main__._program()


def _launcher(words: Sequence[str]) -> int:
    from launch import run
    from modernbert_train.distributed import scratch, stop_signals

    stop_signals.take_over()
    fork_ranks()
    sys.argv = [str(run.__file__), *words]
    scratch.use_for_temporary_files()
    stop_signals.end(run.main(list(words)))


def fork_ranks() -> None:
    """Let torch's launcher in this process fork its ranks."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.Popen = _rank  # type: ignore[assignment]


def _rank(args: Sequence[str], env: Mapping[str, str], **_: Any) -> Forked:
    """Replacement of subprocess.Popen for `python -m modernbert_train ...`."""
    from modernbert_train.distributed import stop_signals

    words = list(args)[list(args).index("modernbert_train") + 1 :]

    def program() -> int:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for handle in map(int, os.listdir("/proc/self/fd")):  # close files that a new program would not inherit
            if handle > 2 and handle != nothing:
                with suppress(OSError):
                    os.dup2(nothing, handle)
        stop_signals._before_a_stop.clear()  # registered by the launcher
        os.environ.clear()
        os.environ.update(env)
        return _verb(words)

    return Forked(program)


def children(pid: int) -> list[int]:
    """Return the living children of a process, the oldest first."""
    pids: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            pids += map(int, task.read_text().split())
    return sorted(child for child in pids if alive(child))


def descendants(pid: int) -> list[int]:
    return [each for child in children(pid) for each in (child, *descendants(child))]


def alive(pid: int) -> bool:
    """Return True if a process runs or is stopped, but is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def reap(besides: int = 0) -> None:
    """Reap adopted processes, which would stay zombies, except a child that is still waited for."""
    for child in list(map(int, Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())):
        if child != besides and not alive(child):
            with suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)
