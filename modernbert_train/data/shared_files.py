"""Files that the processes of a machine share: locks that end with their process, and errors that name the cache."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modernbert_train.core.files import lock_now, unlock
from modernbert_train.data.download import Patience
from modernbert_train.errors import StorageError

_LOOK_SECONDS = 0.05


@contextmanager
def locked(path: Path, patience: Patience, growing: Path | None = None) -> Iterator[None]:
    """Hold a lock; waits for its owner as long as a file in the folder `growing` grows."""
    while True:
        with try_lock(path) as mine:
            if mine:
                yield
                return
        if growing is not None:
            patience.saw(sum(map(size_of, growing.glob("attempt-*"))))
        if patience.over(ahead=-1):  # a second more than its owner has, who can tell what is the matter
            raise StorageError(
                f"{path}: held by another process of this machine, which makes no progress for "
                f"{patience.seconds:g} s (data.download_timeout_seconds). End that process, or use another "
                "data.cache_folder."
            )
        time.sleep(_LOOK_SECONDS)


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Take a lock if it is free. It is the process's own: the kernel drops it when the process ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError as error:
        raise cannot_write(path, error) from error
    with file:
        try:
            mine = lock_now(file)
        except OSError as error:  # a file system without locks
            raise cannot_write(path, error) from error
        try:
            yield mine
        finally:
            if mine:
                unlock(file)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Around writing into the cache: what the disk refuses is a StorageError."""
    try:
        yield
    except OSError as error:
        raise cannot_write(folder, error) from error


def cannot_write(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{path}: the cache of remote shards cannot be written ({error.strerror}). Free some space, fix the "
        "permissions, or point data.cache_folder at a local disk."
    )


def touch(path: Path) -> bool:
    """Mark a file as just read; says whether it is there."""
    with contextlib.suppress(OSError):
        os.utime(path)
        return True
    return False


def size_of(path: Path) -> int:
    """Bytes of a file; 0 if another process has removed it."""
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def mtime(path: Path) -> int:
    """When a file was last touched; long ago if another process has removed it."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns
    return 0
