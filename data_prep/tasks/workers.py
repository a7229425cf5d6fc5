"""Processes that run tasks on this machine: each is started once and serves every stage.

They die with the process that started them, however it dies, so that a restart finds nobody at work.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any

from tqdm import tqdm

from modernbert_train.distributed.orphans import die_with
from modernbert_train.errors import RunError

_LINE_SECONDS = 10.0  # between two lines in a file
_SPAWN = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang


class Workers:
    """At most `number` processes; an error that leaves the `with` block ends them, whatever they are doing.

    Args:
        number: of them; with one the tasks are done in this process.
        remedy: what to do where memory ran out, for the message.
    """

    def __init__(self, number: int, remedy: str = "set executor.workers or max_characters lower") -> None:
        self._number = number
        self._remedy = remedy
        self._others = multiprocessing.active_children()
        self._pool = ProcessPoolExecutor(number, _SPAWN, _begin, (os.getpid(),))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            for process in self._processes():
                process.kill()
        self._pool.shutdown(cancel_futures=True)

    def run(self, job: Any, ranks: Sequence[int], what: str, of_all: int) -> None:
        """Run tasks, as many at a time as there are processes, and say on stderr how many are done.

        Args:
            job: has the method `run_task(rank)`, and is pickled: each task has its own.
            ranks: numbers of the tasks.
            what: they do, in a word.
            of_all: tasks there are, with those that were done before.

        Raises:
            RunError: what a task raised, or that its process died. Other tasks are then still running; leave the block.
        """
        pickled, done = pickle.dumps(job), of_all - len(ranks)
        seconds = 1.0 if sys.stderr.isatty() else _LINE_SECONDS
        bar = partial(tqdm, desc=what, initial=done, total=of_all, mininterval=seconds, delay=seconds, file=sys.stderr)
        if min(self._number, len(ranks)) < 2:
            for rank in bar(ranks):
                _run_task(pickled, rank)
            return
        futures = [self._pool.submit(_run_task, pickled, rank) for rank in ranks]
        processes = self._processes()
        try:
            for future in bar(as_completed(futures)):
                future.result()
        except BrokenProcessPool:
            for process in processes:
                process.join()
            codes = {process.exitcode or 0 for process in processes} - {0, -signal.SIGTERM}  # by which the pool ends
            how = f"was killed by {signal.Signals(-min(codes)).name}" if codes and min(codes) < 0 else "ended by itself"
            raise RunError(
                f"a process {how} amid its task. If memory ran out, {self._remedy}; the same command resumes."
            ) from None

    def _processes(self) -> list[Any]:
        return [each for each in multiprocessing.active_children() if each not in self._others]


def _begin(parent: int) -> None:
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches everyone; the parent decides
    os.environ["OMP_NUM_THREADS"] = "1"  # one process is one core
    tqdm.set_lock(
        threading.RLock()
    )  # its usual one is a semaphore of the system, which outlives a process that is killed


def _run_task(pickled: bytes, rank: int) -> None:
    pickle.loads(pickled).run_task(rank)
