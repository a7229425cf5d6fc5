"""Run programs in forks of a process that has imported a run's packages: 0.1 CPU seconds a start instead of 4.

`run` and `Popen` replace `subprocess.run` and `subprocess.Popen` for a command that begins with `sys.executable`, in
tests of a program's work, exit or messages. A fork has separate streams, environment, working directory, signals and
exit code; the ranks of `launch/run.py` are forks of the launcher, see benchmarks/drill/warm.py. Tests of imports or of
the interpreter use `subprocess`.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import torch

from benchmarks.drill import warm

# the server has one thread and has only imported; it ends with this process
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.support.preload"])


class Popen:
    """The part of subprocess.Popen that tests use; the program is no child of this process.

    Attributes:
        pid: its process id.
        returncode: None until `poll` or `wait` has seen its end; negative if a signal ended it.
        stdout, stderr: text files if they were PIPE, else None.
    """

    def __init__(
        self,
        args: Sequence[str],
        *,
        stdout: IO[Any] | int | None = None,
        stderr: IO[Any] | int | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        text: bool = True,
        start_new_session: bool = False,
    ) -> None:
        self.args = [str(word) for word in args]
        assert self.args[0] == sys.executable and text, self.args
        self.stdout, output = _stream(stdout, 1)
        self.stderr, errors = (None, output) if stderr == subprocess.STDOUT else _stream(stderr, 2)
        environment = dict(os.environ if env is None else env)
        job = (self.args[1:], str(cwd or os.getcwd()), environment, output, errors, start_new_session)
        self._process = CONTEXT.Process(target=_become, args=job)
        self._process.start()
        output.close()
        errors.close()
        self.pid = self._process.pid or 0
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode or 0

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return the program's output and errors until its exit; empty for streams that are not PIPE."""
        texts = ["", ""]

        def read(number: int, file: IO[str]) -> None:
            with file:
                texts[number] = file.read()

        files = [(number, file) for number, file in enumerate((self.stdout, self.stderr)) if file is not None]
        readers = [threading.Thread(target=read, args=each, daemon=True) for each in files]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        if self.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        if self.poll() is None:
            self._process.kill()


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
    process = Popen(command, **how)
    try:
        output, errors = process.communicate(timeout=timeout)
    finally:
        process.kill()
    done = subprocess.CompletedProcess(command, process.wait(), output, errors)
    if check:
        done.check_returncode()
    return done


def outputs() -> tuple[Connection, Connection]:
    """Return where this process prints, for `print_to`."""
    return Connection(os.dup(1), readable=False), Connection(os.dup(2), readable=False)


def print_to(output: Connection, errors: Connection) -> None:
    """In a process of CONTEXT: print to these streams instead of the server's."""
    os.dup2(output.fileno(), 1)
    os.dup2(errors.fileno(), 2)


def settle(environment: Mapping[str, str]) -> None:
    """In a process of CONTEXT: take this environment, as a new interpreter would."""
    multiprocessing.set_start_method("fork", force=True)  # for its children, as in a new interpreter
    os.environ.clear()
    os.environ.update(environment)
    if "OMP_NUM_THREADS" in environment:  # torch reads it when it is imported
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))


def _stream(given: IO[Any] | int | None, own: int) -> tuple[IO[str] | None, Connection]:
    """Return the end that is read here, or None, and the end to write to."""
    if given == subprocess.PIPE:
        reading, writing = os.pipe()
        return os.fdopen(reading, encoding="utf-8"), Connection(writing, readable=False)
    if given == subprocess.DEVNULL:
        return None, Connection(os.open(os.devnull, os.O_WRONLY), readable=False)
    handle = own if given is None else given if isinstance(given, int) else given.fileno()
    return None, Connection(os.dup(handle), readable=False)


def _become(
    words: Sequence[str],
    cwd: str,
    environment: Mapping[str, str],
    output: Connection,
    errors: Connection,
    new_session: bool,
) -> None:
    """Do what `python WORDS` would."""
    print_to(output, errors)
    output.close()
    if errors is not output:
        errors.close()
    if new_session:
        os.setsid()
    os.chdir(cwd)
    settle(environment)
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
        warm.fork_ranks()
        sys.argv = list(words)
        sys.path.insert(0, str(Path(kind).resolve().parent))
        runpy.run_path(kind, run_name="__main__")
