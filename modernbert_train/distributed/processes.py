"""Commands as processes of their own, a few at a time, which live and die with this one.

Each has its share of the GPUs and cores, and a file for what it says. A stop signal is passed on, and all save and end
before this process does; if this one is killed, the kernel kills them (orphans.py). None of them gets the terminal's
own signals.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from modernbert_train.distributed.orphans import LAUNCHER
from modernbert_train.distributed.stop_signals import handled_by

_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Job:
    """A command to run.

    Attributes:
        name: that tells it from the others.
        command: the words; a program of ours, which follows its launcher.
        log: what it prints is added here.
    """

    name: str
    command: Sequence[str]
    log: Path


def environments(places: int, environment: Mapping[str, str], gpus: int, cores: int) -> list[dict[str, str]]:
    """The environment of each of so many processes at a time: a GPU of its own if there are as many, and its cores.

    Args:
        places: processes at a time; more of them than GPUs share these in turn.
        environment: of this process.
        gpus: that this process may use.
        cores: of this machine.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in visible.split(",")][:gpus] if visible else [str(index) for index in range(gpus)]
    found = []
    for place in range(places):
        own = dict(environment)
        own.setdefault("OMP_NUM_THREADS", str(max(1, cores // places)))
        if gpus:
            own["CUDA_VISIBLE_DEVICES"] = names[place % gpus]
        found.append(own)
    return found


def run_jobs(
    jobs: Sequence[Job],
    places: Sequence[Mapping[str, str]],
    ended: Callable[[Job, int], None],
    meanwhile: Callable[[], None] = lambda: None,
) -> bool:
    """Run all jobs, as many at a time as there are places. For the main thread alone: with it the processes end.

    Args:
        jobs: in the order of their start.
        places: the environment of each.
        ended: told of each job that has ended, with its exit code; negative is the number of a signal.
        meanwhile: called now and then, for what is quick.

    Returns:
        Whether a signal asked to stop: then no further job was started, and those that ran have ended.
    """
    running: dict[int, tuple[Job, subprocess.Popen[bytes]]] = {}
    waiting, signals = list(jobs), []  # type: list[Job], list[int]

    def pass_on(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        for _, process in running.values():
            process.send_signal(signal.SIGTERM)

    with handled_by(pass_on):
        try:
            while running or (waiting and not signals):
                for place in range(len(places)):
                    if place not in running and waiting and not signals:
                        job = waiting.pop(0)
                        running[place] = job, _start(job, places[place])
                        if signals:  # between its start and its place in the list
                            running[place][1].send_signal(signal.SIGTERM)
                over = [place for place, (_, process) in running.items() if process.poll() is not None]
                for place in over:
                    job, process = running.pop(place)
                    ended(job, process.returncode)
                if not over:
                    meanwhile()
                    time.sleep(_LOOK_SECONDS)
        finally:
            for _, process in running.values():  # an error here: theirs is to save
                process.send_signal(signal.SIGTERM)
            for _, process in running.values():
                process.wait()
    return bool(signals)


def _start(job: Job, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    own = {**environment, LAUNCHER: str(os.getpid())}
    with job.log.open("ab") as log:
        return subprocess.Popen(
            job.command,
            env=own,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
