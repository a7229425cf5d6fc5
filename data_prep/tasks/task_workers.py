"""Processes that run tasks on this machine: each is started once and serves every stage.

They die with the process that started them, even if it is killed, so a restart never meets old ones.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, NamedTuple

from tqdm import tqdm

from modernbert_train import import_hook
from modernbert_train.distributed.orphans import die_with
from modernbert_train.errors import RunError

_LINE_SECONDS = 5.0  # between two lines in a file
_LOOK_SECONDS = 1.0  # between two updates of the number of documents
_SPAWN = multiprocessing.get_context("spawn")  # forking a process with threads may deadlock


class Documents(NamedTuple):
    """The documents of a stage, for its bar.

    Attributes:
        count: returns the number done so far; called repeatedly.
        total: of the stage; None: not known.
    """

    count: Callable[[], int]
    total: int | None


class Workers:
    """At most `number` processes; an error that leaves the `with` block kills them.

    Args:
        number: of processes; with one the tasks run in this process.
        remedy: advice for running out of memory.
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

    def run(self, job: Any, ranks: Sequence[int], what: str, of_all: int, documents: Documents | None = None) -> None:
        """Run tasks in parallel, and report the progress on stderr.

        Args:
            job: has the method `run_task(rank)`, and is pickled: each task gets a copy.
            ranks: numbers of the tasks.
            what: the tasks' work, in one word.
            of_all: number of all tasks, including those done before.
            documents: counter of documents, for the bar.

        Raises:
            RunError: a task raised it, or its process died. Other tasks are then still running; leave the block.
        """
        pickled = pickle.dumps(job)
        with _bar(what, of_all - len(ranks), of_all, documents) as one_done:
            if min(self._number, len(ranks)) < 2:
                for rank in ranks:
                    _run_task(pickled, rank)
                    one_done()
                return
            futures = [self._pool.submit(_run_task, pickled, rank) for rank in ranks]
            self._wait(futures, one_done)

    def _wait(self, futures: Sequence[Future[None]], one_done: Callable[[], object]) -> None:
        processes = self._processes()
        try:
            for future in as_completed(futures):
                future.result()
                one_done()
        except BrokenProcessPool:
            for process in processes:
                process.join()
            codes = {process.exitcode or 0 for process in processes} - {0, -signal.SIGTERM}  # SIGTERM: sent by the pool
            how = f"was killed by {signal.Signals(-min(codes)).name}" if codes and min(codes) < 0 else "ended by itself"
            raise RunError(
                f"a process {how} during its task. If memory ran out, {self._remedy}; the same command resumes."
            ) from None

    def _processes(self) -> list[Any]:
        return [each for each in multiprocessing.active_children() if each not in self._others]


@contextmanager
def _bar(what: str, done: int, tasks: int, documents: Documents | None) -> Iterator[Callable[[], object]]:
    """Show a bar of tasks, or of documents; yield a function to call after each task."""
    seconds = _LOOK_SECONDS if sys.stderr.isatty() else _LINE_SECONDS
    usual: dict[str, Any] = {"desc": what, "mininterval": seconds, "delay": seconds, "file": sys.stderr}
    if documents is None:
        with tqdm(initial=done, total=tasks, unit=" tasks", **usual) as bar:
            yield bar.update
        return
    ended, finished = threading.Event(), [done]

    def one_done() -> None:
        finished[0] += 1

    with tqdm(initial=documents.count(), total=documents.total, unit=" documents", unit_scale=True, **usual) as bar:

        def look() -> None:
            bar.set_postfix_str(f"{finished[0]} of {tasks} tasks", refresh=False)
            bar.update(documents.count() - bar.n)

        def watch() -> None:
            while not ended.wait(_LOOK_SECONDS):
                look()

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield one_done
        finally:
            ended.set()
            watcher.join()
            look()


def _begin(parent: int) -> None:
    import_hook.only_shards()
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent decides
    os.environ["OMP_NUM_THREADS"] = "1"  # one process per core
    tqdm.set_lock(threading.RLock())  # its default is a semaphore of the system, which outlives a killed process


def _run_task(pickled: bytes, rank: int) -> None:
    pickle.loads(pickled).run_task(rank)
