"""Whole or invisible: a dataset is written beside its place and renamed into it when complete.

The folder being written holds a locked file, and the kernel drops the lock when its process dies however it dies.
So leftovers of dead runs are known for certain, and a second run on the same place is refused.
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modernbert_train.errors import StorageError
from modernbert_train.files import free_bytes, lock_now, publish

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
            lock_now(lock)  # nobody else knows of it
            try:
                yield partial
                (partial / _LOCK).unlink()
                replaced = publish(partial, out)
                if replaced is not None:
                    shutil.rmtree(replaced, ignore_errors=True)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        free = free_bytes(out)
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
    free = free_bytes(out)
    if free < needed:
        raise StorageError(
            f"{out}: needs about {needed:,} bytes, {free:,} are free. Free space, or give another folder with out=..."
        )


def _remove_leftovers(out: Path) -> None:
    name = glob.escape(out.name)
    for folder in out.parent.glob(f"{name}.partial-*"):
        with (folder / _LOCK).open("a") as lock:
            if not lock_now(lock):
                raise StorageError(
                    f"{folder}: another process is writing {out} at this moment. Wait for it, or give another folder "
                    "with out=..."
                )
            shutil.rmtree(folder)
