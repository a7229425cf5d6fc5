"""Read large files once per machine: one rank reads, the other ranks of the machine receive."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from modernbert_train.core.read_once import asked_for, known, learn
from modernbert_train.distributed.group import gather_from_all, local_rank, this_rank, wait_for_all
from modernbert_train.errors import RunError

T = TypeVar("T")
_MAX_SENT = 1 << 13  # bytes sent to every rank of the job; larger results go through a file to the machine's ranks


def read_once_per_node(ask: Callable[[], T], *reads: Callable[[Path], Any]) -> T:
    """Call `ask` on every rank; files that the machine's first rank has read are not read by its other ranks.

    A rank that sees another file under the same name, as in a separate container, reads its own. A collective.

    Args:
        ask: reads files through `read_once`.
        reads: reader functions; their results can be pickled.

    Raises:
        RunError: `ask` raises it, on the ranks where it does.
    """
    cached: list[list[tuple[str, tuple[int, ...], Any]]] = []
    if local_rank() == 0:
        with asked_for() as paths, suppress(RunError):  # every rank raises it below
            ask()
        cached = [known(read, paths) for read in reads]
    with _small(pickle.dumps(cached)) as message:
        messages = gather_from_all(message)
        mine = messages[this_rank() - local_rank()]
        if local_rank() != 0:
            with suppress(OSError, ValueError):  # missing or damaged here: the rank then reads for itself
                content = mine if isinstance(mine, bytes) else Path(mine).read_bytes()
                # empty if it could not be written
                for read, each in zip(reads, pickle.loads(content), strict=False):
                    learn(read, each)
        if str in map(type, messages):
            wait_for_all()  # before the file is removed
    return ask()


@contextmanager
def _small(content: bytes) -> Iterator[bytes | str]:
    """Yield the bytes, or the path of a local file that holds them, if one can be written."""
    if len(content) <= _MAX_SENT:
        yield content
        return
    path = None
    try:
        handle, path = tempfile.mkstemp(prefix="read-per-node-")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
    except OSError:
        yield pickle.dumps([])
    else:
        yield path
    finally:
        if path is not None:
            with suppress(OSError):
                os.unlink(path)
