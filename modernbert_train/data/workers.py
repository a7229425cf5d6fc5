"""Deliver the batches of DataLoader workers in order; a worker that dies or hangs ends the run and is named.

Torch notices a dead worker in a signal handler, which raises at any place in the program: in a step, or in a
garbage collection that swallows it. So its handler watches the workers only while we wait for them; there it interrupts
a read that a half-written message would block forever. Before each wait we check them ourselves. Torch's own timeout is
short here and only wakes us up, so that dead and hanging workers can be distinguished.
"""

from __future__ import annotations

import errno
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from typing import Any

from torch.autograd.profiler import record_function
from torch.utils.data import DataLoader

from modernbert_train.core.torch_internals import abandon_workers, watch_workers, worker_processes
from modernbert_train.errors import RunError, StorageError

LOOK_SECONDS = 1.0  # required timeout of a DataLoader passed to `deliveries`
_END = object()
# messages of torch's handler while workers are being started, when it cannot be switched off
_GONE = re.compile(r"DataLoader worker \(pid\(?s?\)? (\d+)\) (?:is )?(killed by signal: \w+|exited unexpectedly[^.]*)")


def deliveries(loader: DataLoader[Any], timeout_seconds: float) -> Iterator[Any]:
    """Yield the items of a DataLoader.

    Args:
        loader: with LOOK_SECONDS as its timeout, if it has workers; map-style and in order.
        timeout_seconds: longest wait for one item.

    Raises:
        RunError: a worker is dead, or did not deliver in time; names it and its process.
        StorageError: /dev/shm is too small for them.
    """
    try:
        batches: Any = iter(loader)
    except Exception as error:  # a RuntimeError from torch, or the broken connection's error; others are raised again
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise StorageError(
                f"/dev/shm: is too small for the queues of data.num_workers={loader.num_workers}. Give the container "
                "more (docker run --shm-size=8g), or set data.num_workers=0."
            ) from error
        if (gone := _GONE.search(_all_messages(error))) is None:
            raise
        raise _lost(f"process {gone[1]}", gone[2]) from error
    if loader.num_workers == 0:
        yield from batches
        return
    watch_workers(batches, False)
    with record_function("data"):
        pass  # torch imports modules at first use; an import interrupted by the handler would print a traceback
    with closing(_Watch(batches)) as watch:
        for number in count():
            item = _wait(batches, number, timeout_seconds, watch)
            if item is _END:
                return
            yield item


class _Watch:
    """Ends a wait that torch's timeout does not cover: the worker passes memory itself, and if it freezes while doing
    so the wait is unlimited. Then all workers are killed, and torch's handler interrupts our wait.

    Attributes:
        deadline: of the present wait; None: no wait.
        over: True once a wait was ended.
    """

    def __init__(self, batches: Any) -> None:
        self.deadline: float | None = None
        self.over = False
        self._workers = worker_processes(batches)
        self._closed = threading.Event()
        threading.Thread(target=self._look, name="data workers", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _look(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            deadline = self.deadline
            if deadline is not None and time.monotonic() > deadline + 3 * LOOK_SECONDS:
                self.over = True
                for worker in self._workers:
                    worker.kill()
                return


def _wait(batches: Any, number: int, timeout_seconds: float, watch: _Watch) -> Any:
    deadline = watch.deadline = time.monotonic() + timeout_seconds
    while True:
        _require_alive(batches, None)
        try:
            with _torch_looking(batches):
                item = next(batches, _END)
            watch.deadline = None
            return item
        except Exception as error:  # as above; errors not caused by a dead or hanging worker are raised again
            if watch.over:
                raise _silent(batches, number, timeout_seconds) from error
            if isinstance(error, RunError) or str(error).startswith("Caught "):
                raise  # raised by our code in the worker
            _require_alive(batches, error)
            if not str(error).startswith("DataLoader timed out"):
                time.sleep(LOOK_SECONDS)  # a dying worker breaks the connection before it is gone
                _require_alive(batches, error)
                raise
        if time.monotonic() > deadline:
            raise _silent(batches, number, timeout_seconds)


def _silent(batches: Any, number: int, timeout_seconds: float) -> RunError:
    workers = worker_processes(batches)
    index = number % len(workers)  # torch assigns work round-robin
    process = workers[index].pid
    abandon_workers(batches)
    return RunError(
        f"data worker {index} (process {process}): no batch for {timeout_seconds:g} s (data.worker_timeout_seconds). "
        "See whether a disk or a network hangs, or raise the timeout; the same command resumes from the newest "
        "checkpoint."
    )


def _require_alive(batches: Any, error: Exception | None) -> None:
    for index, worker in enumerate(worker_processes(batches)):
        if worker.is_alive():
            continue
        code, process = worker.exitcode, worker.pid
        abandon_workers(batches)
        how = f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"gone with exit code {code}"
        raise _lost(f"{index} (process {process})", how) from error


def _lost(worker: str, how: str) -> RunError:
    return RunError(
        f"data worker {worker}: {how}. If the machine ran out of memory (see dmesg), lower data.num_workers, "
        "data.prefetch_batches or data.shuffle_block_shards; the same command resumes from the newest checkpoint."
    )


def _all_messages(error: BaseException | None) -> str:
    """Return the messages of an error and its causes: torch's handler may have interrupted an import."""
    messages = []
    while error is not None:
        messages.append(str(error))
        error = error.__cause__ or error.__context__
    return "\n".join(messages)


@contextmanager
def _torch_looking(batches: Any) -> Iterator[None]:
    watch_workers(batches, True)
    try:
        yield
    finally:
        watch_workers(batches, False)
