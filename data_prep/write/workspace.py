"""Whole or invisible: a dataset is written beside its place and renamed into it when complete.

The folder being written holds a locked file, and the kernel drops the lock when its process dies however it dies.
So leftovers of dead runs are known for certain, and a second run on the same place is refused.
"""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modernbert_train.errors import StorageError

_LOCK = ".lock"


@contextmanager
def workspace(out: Path) -> Iterator[Path]:
    """Give an empty folder that takes the place of `out` when the block ends, and vanishes when it fails.

    Args:
        out: where the folder goes; what is there now is replaced. If it is a link, the link stays and its target
            is what is written.

    Raises:
        StorageError: another process is writing `out`, or a disk operation fails inside the block.
    """
    if out.is_symlink():  # beside the link may be another disk, and a rename would replace the link
        out = out.resolve()
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(out)
        partial.mkdir()
        with (partial / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                yield partial
                _publish(partial, out)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        free = shutil.disk_usage(_existing(out)).free
        raise StorageError(
            f"{error.filename or partial}: {error.strerror or error} ({free:,} bytes free). Free space, "
            "or give another folder with out=..., and start again."
        ) from error


def require_space(out: Path, needed: int) -> None:
    """Refuse to start writing what will not fit.

    Args:
        out: the folder to be written; it need not exist.
        needed: bytes, an estimate from above.

    Raises:
        StorageError: fewer bytes are free on its disk; names both numbers.
    """
    free = shutil.disk_usage(_existing(out)).free
    if free < needed:
        raise StorageError(
            f"{out}: needs about {needed:,} bytes, {free:,} are free. Free space, or give another folder with out=..."
        )


def _existing(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    path = path.absolute()
    return next(p for p in (path, *path.parents) if p.exists())


def _remove_leftovers(out: Path) -> None:
    name = glob.escape(out.name)
    for folder in [*out.parent.glob(f"{name}.partial-*"), *out.parent.glob(f"{name}.replaced-*")]:
        with (folder / _LOCK).open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StorageError(
                    f"{folder}: another process is writing {out} at this moment. Wait for it, or give another folder "
                    "with out=..."
                ) from None
            shutil.rmtree(folder)


def _publish(partial: Path, out: Path) -> None:
    """Everything reaches the disk before the name does, so that a power cut leaves the old state or the new one."""
    (partial / _LOCK).unlink()
    for path in [*partial.rglob("*"), partial]:
        _sync(path)
    replaced = out.with_name(f"{out.name}.replaced-{os.getpid()}")
    if out.exists():
        out.rename(replaced)
    partial.rename(out)
    _sync(out.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
