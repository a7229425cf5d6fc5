"""Run many commands as child processes, a few at a time, which end with this one.

Each gets its share of the GPUs and cores, and a log file. A stop signal is passed on, and all children save and end
before this process does; if this one is killed, the kernel signals them (follow.py). None of them receives the
terminal's signals.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from modernbert_train.core.text import plural, printable
from modernbert_train.distributed.stop_signals import handled_by
from modernbert_train.errors import RunError, StoppedEarly

_FOLLOW = Path(__file__).with_name("follow.py")
_POLL_SECONDS = 0.1
_LOOK_SECONDS = 1.0
# saved and ended; or ended by the signal itself, before Python could handle it
_STOPPED = (StoppedEarly.exit_code, -signal.SIGTERM, -signal.SIGINT, -signal.SIGUSR1)


@dataclass(frozen=True)
class Job:
    """A command to run.

    Attributes:
        name: unique among the jobs.
        command: the words.
        log: the command and its output are appended here.
        orphaned: signal sent to it when this process is killed.
        pass_fds: open file descriptors that it inherits.
    """

    name: str
    command: Sequence[str]
    log: Path
    orphaned: signal.Signals = signal.SIGKILL
    pass_fds: Sequence[int] = ()


class Failure(NamedTuple):
    """A failed run, or another part of a table that failed.

    Attributes:
        exit_code: of its process; negative: the number of the signal that killed it.
        message: the last error in its log.
        log: the file, or the folder of a run without one.
    """

    exit_code: int
    message: str
    log: Path

    def __str__(self) -> str:
        return f"failed with exit code {self.exit_code}: {self.message}"


Failures = dict[str, Failure]  # by name of the run or part


def environments(
    slots: int, environment: Mapping[str, str], gpus: int, cores: int, ranks: int = 1
) -> list[dict[str, str]]:
    """Return the environment of each slot: its own GPUs if there are enough, and its share of the cores.

    Args:
        slots: commands that run at a time; if they outnumber the GPUs, they share them round-robin.
        environment: of this process.
        gpus: number that this process may use.
        cores: of this machine.
        ranks: processes of a command, each with a GPU.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in visible.split(",")][:gpus] if visible else [str(index) for index in range(gpus)]
    environments_of_jobs = []
    for slot in range(slots):
        own = dict(environment)
        own.setdefault("OMP_NUM_THREADS", str(max(1, cores // (slots * ranks))))
        if gpus:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(names[(slot * ranks + rank) % gpus] for rank in range(ranks))
        environments_of_jobs.append(own)
    return environments_of_jobs


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    orphaned: signal.Signals = signal.SIGKILL,
    *,
    own_session: bool = True,
    **streams: Any,
) -> subprocess.Popen[Any]:
    """Start a command that is signalled when this process dies.

    Args:
        command, orphaned: see `Job`.
        environment: of the command.
        own_session: detach it from the terminal's signals.
        streams: standard input and output, and further arguments of `subprocess.Popen`.
    """
    follow = [sys.executable, "-S", str(_FOLLOW), str(os.getpid()), str(int(orphaned))]
    return subprocess.Popen([*follow, *command], env=dict(environment), start_new_session=own_session, **streams)


def run_all(
    jobs: Iterator[Job | None],
    slots: Sequence[Mapping[str, str]],
    ended: Callable[[Job, int], None],
    look: Callable[[Job], object] = lambda job: None,
) -> bool:
    """Run all jobs, as many at a time as there are slots. Call it on the main thread: the children die with it.

    Args:
        jobs: in order of start, read when a slot is free; None: not yet, read again in a second.
        slots: the environment of each.
        ended: called with each finished job and its exit code: 75 if it was stopped, the negative signal number if
            another signal killed it.
        look: called every second for each running job; a true result stops the job.

    Returns:
        True if a signal requested a stop: then no further job was started, and the running ones have ended.
    """
    running: dict[int, tuple[Job, subprocess.Popen[Any]]] = {}
    signals: list[int] = []
    more, asks_again, looked = True, True, time.monotonic()

    def pass_on(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        for _, process in running.values():
            process.send_signal(signal.SIGTERM)

    with handled_by(pass_on):
        try:
            while running or (more and not signals):
                for slot in [slot for slot in range(len(slots)) if slot not in running]:
                    if not (more and asks_again) or signals:
                        break
                    try:
                        job = next(jobs)
                    except StopIteration:
                        more = False
                        break
                    asks_again = job is not None
                    if job is not None and not signals:
                        running[slot] = job, _start(job, slots[slot])
                        if signals:  # a signal arrived between its start and this line
                            running[slot][1].send_signal(signal.SIGTERM)
                over = [slot for slot, (_, process) in running.items() if process.poll() is not None]
                for slot in over:
                    job, process = running.pop(slot)
                    asks_again = True
                    stopped = signals or process.returncode in _STOPPED
                    ended(job, StoppedEarly.exit_code if process.returncode and stopped else process.returncode)
                if not over:
                    time.sleep(_POLL_SECONDS)
                if time.monotonic() - looked >= _LOOK_SECONDS:
                    asks_again, looked = True, time.monotonic()
                    for job, process in running.values():
                        if look(job):
                            process.send_signal(signal.SIGTERM)
        finally:
            for _, process in running.values():  # on an error here, let the children save
                process.send_signal(signal.SIGTERM)
            for _, process in running.values():
                process.wait()
    return bool(signals)


def _start(job: Job, environment: Mapping[str, str]) -> subprocess.Popen[Any]:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab") as log:
        log.write(f"$ {shlex.join(job.command)}\n".encode())
        log.flush()
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        return start(job.command, environment, job.orphaned, pass_fds=job.pass_fds, **streams)


def last_words(log: Path) -> str:
    """Return the last error in the log of a job's last start, or its last line without one."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    lines = [line.strip() for line in text.split("\n$ ")[-1].splitlines()[1:] if line.strip()]
    return ([line for line in lines if "error:" in line.lower()] or lines or ["it said nothing"])[-1][:400]


def newest_line(log: Path) -> str:
    """Return the last line of a job's log, which shows its progress."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode("utf-8", "replace").split("\n")
    return printable(next((line.strip() for line in reversed(lines) if line.strip()), ""))[:200]


def raise_failures(
    failed: Mapping[str, Failure],
    out: Path | None = None,
    *,
    stopped: bool = False,
    counted: str | None = None,
    remedy: str = "Add --retry to repeat what failed",
) -> None:
    """Raise the error that the program ends with: 75 after a stop, else the code of the first failure.

    Args:
        failed: by name.
        out: folder of the runs, named after a stop.
        stopped: True after a stop.
        counted: the failures in words, such as "2 parts"; None: counted as runs.
        remedy: how to repeat them.

    Raises:
        StoppedEarly: a signal came, and the runs have saved.
        RunError: some of them failed; names each with its log.
    """
    names: dict[Failure, list[str]] = {}
    for name, failure in failed.items():
        names.setdefault(failure, []).append(name)
    lines = [
        f"  {', '.join(own)}: exit code {one.exit_code}; {one.log}\n    {one.message}" for one, own in names.items()
    ]
    message = ""
    if lines:
        head = f"{counted or plural(len(failed), 'run')} failed; all others are kept. {remedy}:"
        message = "\n".join([head, *lines])
    if stopped:
        raise StoppedEarly("\n".join(filter(None, [f"{out}: stopped. The same command resumes.", message])))
    if message:
        failure, code = RunError(message), next(iter(failed.values())).exit_code
        failure.exit_code = code if code > 0 else RunError.exit_code
        raise failure
