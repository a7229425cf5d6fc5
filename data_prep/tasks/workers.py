"""Processes that run tasks on this machine: each is started once and serves every stage.

Neither pool of the standard library will do: `multiprocessing.Pool` waits for ever for a task whose process was killed,
and the one of `concurrent.futures` cannot end tasks that are running. Workers die with the process that started them,
however it dies, so that a restart finds nobody at work.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, cast

from modernbert_train.errors import RunError
from modernbert_train.ranks.orphans import die_with

_SPAWN = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
_PATIENCE_SECONDS = 5.0  # a worker that is told to end puts its semaphores away


class Workers:
    """At most `number` processes; leave the `with` block to end them, whatever they are doing.

    Args:
        number: of them.
        remedy: what to do where memory ran out, for the message.
    """

    def __init__(self, number: int, remedy: str = "set executor.workers or max_characters lower") -> None:
        self._number = number
        self._remedy = remedy
        self._running: dict[Connection, Any] = {}  # pipe -> process

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.terminate()
        for connection, process in self._running.items():
            process.join(_PATIENCE_SECONDS)
            process.kill()
            process.join()
            connection.close()
        self._running = {}

    def run(self, executor: bytes, ranks: list[int]) -> None:
        """Run tasks, as many at a time as there are processes.

        Args:
            executor: a pickled object with the method `run_task(rank)`.
            ranks: numbers of the tasks.

        Raises:
            RunError: what a task raised, or that its process died. Other tasks are then still running; leave the block.
        """
        waiting = iter(ranks)
        busy: dict[Connection, int] = {}
        for connection in self._processes(min(self._number, len(ranks))):
            self._send(connection, executor, waiting, busy)
        while busy:
            for ready in wait(list(busy)):
                connection = cast(Connection, ready)
                rank = busy.pop(connection)
                try:
                    error = connection.recv()
                except EOFError:
                    raise self._dead(connection, rank) from None
                if error is not None:
                    raise error
                self._send(connection, executor, waiting, busy)

    def _processes(self, number: int) -> list[Connection]:
        while len(self._running) < number:
            ours, theirs = _SPAWN.Pipe()
            process = _SPAWN.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
            process.start()
            theirs.close()  # so that the pipe ends when the process does
            self._running[ours] = process
        return list(self._running)[:number]

    def _send(
        self, connection: Connection, executor: bytes, waiting: Iterator[int], busy: dict[Connection, int]
    ) -> None:
        rank = next(waiting, None)
        if rank is not None:
            busy[connection] = rank
            try:
                connection.send((executor, rank))
            except BrokenPipeError:
                raise self._dead(connection, rank) from None

    def _dead(self, connection: Connection, rank: int) -> RunError:
        process = self._running[connection]
        process.join()
        code = process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return RunError(f"task {rank}: its process {how}. If memory ran out, {self._remedy}; the same command resumes.")


def _serve(connection: Connection, parent: int) -> None:
    """Run the tasks that come through the pipe, until it ends."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches everyone; the parent decides
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    os.environ["OMP_NUM_THREADS"] = "1"  # one process is one core
    while True:
        try:
            executor, rank = connection.recv()
        except EOFError:
            return
        try:
            pickle.loads(executor).run_task(rank)
            connection.send(None)
        except RunError as error:
            connection.send(error)
        except Exception:  # a bug, told as one by the process that waits
            connection.send(RunError(f"task {rank} failed; this is a bug, please report it.\n{traceback.format_exc()}"))
