"""Programs in forks of a process that has imported what a run needs: a start costs milliseconds where it costs 7 s.

`run` and `Popen` take the place of those of `subprocess` for a command that begins with `sys.executable`. The fork does
what that would do after the imports, with streams, environment, working directory, signals and exit code of its own;
the ranks of `launch/run.py` are forks of the launcher, see benchmarks/drill/warm.py. Right wherever a program's work,
its end or its messages are tested; what is promised of imports or of the interpreter takes `subprocess`.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks.drill import warm

# its processes are forked from one that has one thread and has done nothing but import; it ends with this process
CONTEXT = multiprocessing.get_context("forkserver")
PRELOAD = (
    "modernbert_train.train.session",
    "modernbert_train.data.pack_kernel",
    "modernbert_train.weights.export",
    "modernbert_train.report",
    "composer.algorithms",
    "numba.np.arraymath",
    "numba.typed",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "pytest",
    "tests.checkpoints.small_checkpoint",
    "tests.preload",
)
CONTEXT.set_forkserver_preload([*PRELOAD])
COLLECTED = "TESTS_COLLECTED"  # the variable with the arguments of the pytest that tests/collected.py is for


class Popen(subprocess.Popen[str]):
    """A subprocess.Popen whose program is forked; it is no child of this process."""

    def _execute_child(self, args: Sequence[str], *rest: Any) -> None:
        _, _, _, _, cwd, env, _, _, _, *streams, _, _, _, _, _, new_session, _ = rest
        p2cread, _, c2pwrite, errwrite = streams[0], streams[1], streams[3], streams[5]
        command = [str(word) for word in args]
        assert command[0] == sys.executable, command
        self._forked = CONTEXT.Process(
            target=_become,
            args=(
                command[1:],
                os.fspath(cwd or os.getcwd()),
                dict(os.environ if env is None else env),
                [_Stream(given if given != -1 else own) for own, given in enumerate((p2cread, c2pwrite, errwrite))],
                new_session,
            ),
        )
        try:
            self._forked.start()
        finally:
            self._close_pipe_fds(*streams)  # type: ignore[attr-defined]
        self.pid = self._forked.pid or 0
        self._child_created = True

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            self.returncode = self._forked.exitcode
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        self._forked.join(timeout)
        if self._internal_poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode


def run(
    command: Sequence[str],
    *,
    capture_output: bool = False,
    check: bool = False,
    timeout: float | None = None,
    **how: Any,
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run."""
    if capture_output:
        how |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **how) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


def outputs() -> list[_Stream]:
    """Where this process prints, for `print_to`."""
    return [_Stream(1), _Stream(2)]


def print_to(streams: Sequence[int]) -> None:
    """In a process of CONTEXT: print where the process prints that has started it, and not where the first one does."""
    for number, handle in enumerate(streams, start=1):
        os.dup2(handle, number)
        os.close(handle)


def settle(environment: Mapping[str, str]) -> None:
    """In a process of CONTEXT: have it as a new interpreter would that is started with this environment."""
    multiprocessing.set_start_method("fork", force=True)  # its own, in place of how it was started
    os.environ.clear()
    os.environ.update(environment)
    if "OMP_NUM_THREADS" in environment:  # it has been read
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))


class _Stream:
    """A file handle that is pickled to a process that is being started."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self._handle),)


def _received(handle: Any) -> int:
    return int(handle.detach())


def _become(
    words: Sequence[str], cwd: str, environment: dict[str, str], streams: Sequence[int], new_session: bool
) -> None:
    """The rest of a fork's life: what `python WORDS` would do."""
    for number, handle in enumerate(streams):
        os.dup2(handle, number)
        os.close(handle)
    sys.stdin = os.fdopen(0, closefd=False)
    if new_session:
        os.setsid()
    os.chdir(cwd)
    settle(environment)
    warm._run(lambda: _interpret(words))


def _interpret(words: Sequence[str]) -> int:
    kind, *arguments = words[1:] if words[0] == "-u" else words
    if kind == "-c":
        sys.argv = ["-c", *arguments[1:]]
        sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(arguments[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    elif kind == "-m":
        sys.argv = arguments
        for name in (arguments[0], f"{arguments[0]}.__main__"):  # a test imports it
            if not hasattr(sys.modules.get(name), "__path__"):
                sys.modules.pop(name, None)
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

        SubprocessHandler._popen = warm._rank  # type: ignore[assignment,method-assign]
        sys.argv = list(words)
        sys.path.insert(0, str(Path(kind).resolve().parent))
        runpy.run_path(kind, run_name="__main__")
    return 0
