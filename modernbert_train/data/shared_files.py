"""Files shared by the processes of a machine: locks that end with their process, and errors that name the cache."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from modernbert_train.core.files import lock_now, os_errors_as, unlock
from modernbert_train.data.download import Patience
from modernbert_train.errors import StorageError

_LOOK_SECONDS = 0.05


@contextmanager
def locked(path: Path, patience: Patience, growing: Path | None = None) -> Iterator[None]:
    """Hold a lock; wait for its owner while a file in the folder `growing` grows."""
    while True:
        with try_lock(path) as mine:
            if mine:
                yield
                return
        if growing is not None:
            patience.saw(sum(map(size_of, growing.glob("attempt-*"))))
        if patience.over(ahead=-1):  # a second longer than its owner, which can report the cause
            raise StorageError(
                f"{path}: held by another process of this machine, which makes no progress for "
                f"{patience.seconds:g} s (data.download_timeout_seconds). End that process, or use another "
                "data.cache_folder."
            )
        time.sleep(_LOOK_SECONDS)


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Take a lock if it is free. The kernel releases it when the process ends."""
    with ExitStack() as held:
        with writing(path):  # a file system without locks raises an error too
            path.parent.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(path.open("ab"))
            mine = lock_now(file)
        if mine:
            held.callback(unlock, file)
        yield mine


def writing(path: Path) -> AbstractContextManager[None]:
    """Context for writing into the cache: turns an OSError into a StorageError."""
    remedy = "Free some space, fix the permissions, or point data.cache_folder at a local disk."
    return os_errors_as(StorageError, f"{path}: the cache of remote shards cannot be written", remedy)


def touch(path: Path) -> bool:
    """Mark a file as just read; return True if it exists."""
    with suppress(OSError):
        os.utime(path)
        return True
    return False


def size_of(path: Path) -> int:
    """Return the bytes of a file; 0 if another process has removed it."""
    with suppress(OSError):
        return path.stat().st_size
    return 0


def mtime(path: Path) -> int:
    """Return the time of a file's last touch; long ago if another process has removed it."""
    with suppress(OSError):
        return path.stat().st_mtime_ns
    return 0
