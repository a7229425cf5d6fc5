"""Write a dataset atomically: in a temporary folder that is renamed to its place when complete.

`whole_folder` of core/files.py does this; here a second run for the same place is refused.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modernbert_train.core.files import being_written, free_bytes, lock_now, whole_folder
from modernbert_train.errors import ConfigError, StorageError

LOCK = ".lock"
_NUMBERS = re.compile(r"\d+")
Part = tuple[int, int]


@contextmanager
def workspace(out: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `out` when the block ends, and is removed if it fails.

    Args:
        out: the final folder; its present content is replaced. If it is a link, the link stays and its target is
            replaced.

    Raises:
        StorageError: another process is writing `out`, or a disk operation fails inside the block.
    """
    if out.is_symlink():  # the link's folder may be on another disk, and a rename would replace the link
        out = out.resolve()
    with storage_errors(out, "out=..."):
        if (partial := being_written(out)) is not None:
            raise _in_use(partial, out, "out=...")
        with whole_folder(out) as folder:
            yield folder


@contextmanager
def claimed(folder: Path, option: str, part: Part = (1, 1)) -> Iterator[None]:
    """Lock a folder of unfinished work while the block runs; other parts of the same work may share it.

    Args:
        folder: created if necessary.
        option: option that names another folder, for messages.
        part: (i, n) of n machines.

    Raises:
        StorageError: another process has it, it cannot be created, or a disk operation fails inside the block.
    """
    with storage_errors(folder, option):
        folder.mkdir(parents=True, exist_ok=True)
        with (
            (folder / LOCK).open("a") as shared_lock,
            (folder / f"{LOCK}-{part[0]}-of-{part[1]}").open("a") as part_lock,
        ):
            if not (lock_now(shared_lock, shared=part != (1, 1)) and lock_now(part_lock)):
                raise _in_use(folder, folder, option)
            others = {tuple(map(int, _NUMBERS.findall(path.name))) for path in folder.glob(f"{LOCK}-*-of-*")}
            if disagree := [f"{i}/{n}" for i, n in others if n != part[1] and is_at_work(folder, (i, n))]:
                raise ConfigError(
                    f"--part {part[0]}/{part[1]}: another machine works on {folder} as part {disagree[0]}. Give "
                    "every machine the same number of parts."
                )
            yield


def is_at_work(folder: Path, part: Part) -> bool:
    """Return True if a process of any machine works on this part."""
    try:
        with (folder / f"{LOCK}-{part[0]}-of-{part[1]}").open("r") as lock:
            return not lock_now(lock, shared=True)
    except FileNotFoundError:
        return False


@contextmanager
def storage_errors(folder: Path, option: str) -> Iterator[None]:
    """Convert errors of the system inside the block to a StorageError that names the file and the remedy."""
    try:
        yield
    except OSError as error:
        where, other = f"{error.filename2 or error.filename or folder}: {error.strerror or error}", ""
        if error.errno in (errno.EMFILE, errno.ENFILE):
            remedy = "Raise the limit of open files, such as ulimit -n 4096, or set executor.workers lower"
        elif error.errno in (errno.ENOMEM, errno.EAGAIN):
            remedy = "Free memory, or set executor.workers lower"
        elif isinstance(error, (ConnectionError, TimeoutError)):
            remedy = "Wait until it answers"
        else:
            where += f" ({free_bytes(folder):,} bytes free)"
            remedy, other = "Free space or change permissions", f", or another folder with {option}"
        raise StorageError(f"{where}. {remedy}, and give the same command again{other}") from error


def require_space(out: Path, needed: int) -> None:
    """Refuse to start writing without enough space.

    Args:
        out: the future folder; it need not exist.
        needed: bytes, an upper estimate.

    Raises:
        StorageError: fewer bytes are free on its disk; names both numbers.
    """
    free = free_bytes(out)
    if free < needed:
        raise StorageError(
            f"{out}: needs about {needed:,} bytes, {free:,} are free. Free space, or give another folder with out=..."
        )


def _in_use(folder: Path, out: Path, option: str) -> StorageError:
    return StorageError(
        f"{folder}: another process is writing {out} now. Wait for it, or give another folder with {option}"
    )
