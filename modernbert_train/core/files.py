"""Files and folders that are whole or not there, and locks that end with their process: the one place for both.

What is written goes beside its place, to the disk itself, and then by a rename into its place. So a crash, a full disk
or a power cut leaves what was there before, or what should be there, and never a part of it.

A lock belongs to an open file: the kernel drops it when the process ends, however it ends. What is locked is in use,
and what is not locked was left behind. So the next write into a folder removes what killed processes left in it.
"""

from __future__ import annotations

import fcntl
import functools
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from modernbert_train.core.text import first_line
from modernbert_train.errors import RunError, StorageError

_PARTIAL = re.compile(r"\.(?P<name>.+)\.((?P<host>[^/]+)-)?(?P<pid>\d+)\.partial")  # once without a host
_LOCK = "lock"  # in a partial folder, beside the folder that gets the name
_QUIET_SECONDS = 600.0  # without a write, after which an unlocked partial file of another host counts as left behind


def reason_of(error: Exception) -> str:
    """Why, in the words of the error; of kinds whose words alone say little, with the kind."""
    says_all = isinstance(error, OSError | ValueError | ImportError | RunError)
    return f"{'' if says_all else f'{type(error).__name__}: '}{getattr(error, 'strerror', None) or error}"


@contextmanager
def os_errors_as(kind: type[Exception], what: str, remedy: str = "", *others: type[Exception]) -> Iterator[None]:
    """Turn an OSError of the block into an error for the user: `WHAT (reason). REMEDY`.

    Args:
        kind: StorageError for files that we write, DataError for the user's, ValueError where a caller knows which.
        what: the file or folder, and what cannot be done with it.
        remedy: what the user can do.
        others: kinds of errors that are told as one of the disk is.

    Raises:
        Exception: of this kind.
    """
    kinds: tuple[type[Exception], ...] = (OSError, *others)
    try:
        yield
    except kinds as error:
        text = f"{what} ({reason_of(error)})"
        raise kind(f"{text}. {remedy}" if remedy else text) from error


@contextmanager
def values_as(kind: type[Exception], where: str, *others: type[Exception], after: str = "") -> Iterator[None]:
    """Say where a ValueError of the block, as readers of foreign files raise it, comes from: `WHERE: REASON`, AFTER.

    Raises:
        Exception: of this kind.
    """
    kinds: tuple[type[Exception], ...] = (ValueError, *others)
    try:
        yield
    except kinds as error:
        raise kind(f"{where}: {error}{after}") from None


@contextmanager
def anything_as(kind: type[RunError], what: str, remedy: str) -> Iterator[None]:
    """Turn whatever a library raises of a stranger's file, or of a network: `WHAT (first line of the reason). REMEDY`.

    Raises:
        RunError: of this kind; or the block's own.
    """
    try:
        yield
    except Exception as error:  # hubs, caches and damaged files can fail in any way
        if isinstance(error, RunError):
            raise
        raise kind(f"{what} ({first_line(error)[:300]}). {remedy}") from None


@contextmanager
def errors_to(tell: Callable[[str], object], *kinds: type[Exception], before: str = "") -> Iterator[None]:
    """Go on behind the block after an error of these kinds, and tell it: BEFORE, its own words.

    Args:
        tell: what is done with the words: `warn`, or `append` of the list of all that is wrong.
    """
    try:
        yield
    except kinds as error:
        tell(before + reason_of(error))


def warn(text: str) -> None:
    """Say on standard error what does not end the program."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


@contextmanager
def saying(before: str = "", after: str = "", kind: type[RunError] = RunError) -> Iterator[None]:
    """Say more of an error of the block, which stays of its kind: BEFORE, its own words, AFTER.

    Raises:
        RunError: as the block does.
    """
    try:
        yield
    except kind as error:
        raise type(error)(f"{before}{error}{after}") from error


def lock(file: IO[str] | IO[bytes] | int) -> None:
    """Take the lock of an open file or folder, waiting for whoever has it.

    Raises:
        OSError: the file system has no locks.
    """
    fcntl.flock(file, fcntl.LOCK_EX)


def lock_now(file: IO[str] | IO[bytes] | int, *, shared: bool = False) -> bool:
    """Take the lock of an open file or folder if it is free.

    Args:
        file: as long as it is open the lock is held.
        shared: together with all others who ask for it so.

    Returns:
        Whether it was free.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(file: IO[str] | IO[bytes] | int) -> None:
    """Give a lock back before the file is closed: a process forked meanwhile has inherited it."""
    fcntl.flock(file, fcntl.LOCK_UN)


def write_whole(path: Path, text: str) -> None:
    """Write a file as a whole, in UTF-8; what was there is replaced. What cannot be encoded becomes a question mark.

    Raises:
        OSError: the disk refuses it; what was there before is untouched, and nothing else is left.
    """
    _sweep_once(path.parent)
    with _whole_file(path) as file:
        file.write(text.encode("utf-8", "replace"))


def write_out(path: Path, text: str) -> Path:
    """Write the file that a user named, whole or not at all; returns its path.

    Raises:
        StorageError: it cannot be written; what was there before is untouched.
    """
    with os_errors_as(StorageError, f"{path}: cannot be written", "Free space, fix the path, or name another file."):
        write_whole(path, text)
    return path


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """An open file that gets its name at the end of the block, in place of what is there, or is removed.

    Raises:
        OSError: the disk refuses it.
    """
    sweep(path.parent)
    with _whole_file(path) as file:
        yield file


@contextmanager
def _whole_file(path: Path) -> Iterator[IO[bytes]]:
    aside = _aside(path)
    try:
        with aside.open("wb") as file:
            _hold(file)
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def append_line(path: Path, line: str) -> None:
    """Add a line to a file that several processes may add to: the whole line, on the disk itself, or nothing.

    What a crash left there of a line is ended first, so that the new one is read.

    Raises:
        OSError: the disk refuses it; the file is then as it was. Or it is a link, which is not followed.
    """
    with open(path, "a+b", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666)) as file:
        lock(file)
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
        torn = end > 0 and file.read(1) != b"\n"
        try:
            file.write(("\n" if torn else "").encode() + line.encode("utf-8", "replace") + b"\n")
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            file.truncate(end)
            raise


def publish(staging: Path, out: Path) -> Path | None:
    """Give a complete folder its name, once everything in it has reached the disk.

    Args:
        staging: the folder, on the same disk as `out`.
        out: where it goes. A folder there is moved aside, to the name of `staging` with `-replaced` after it.

    Returns:
        The folder that was moved aside, if there was one, for the caller to remove.

    Raises:
        OSError: the disk refuses it.
    """
    for path in [*staging.rglob("*"), staging]:
        sync(path)
    replaced = None
    if out.exists():
        replaced = out.rename(staging.with_name(f"{staging.name}-replaced"))
    try:
        staging.rename(out)
    except OSError:
        if replaced is not None:
            replaced.rename(out)
        raise
    sync(out.parent)
    return replaced


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """An empty folder that gets the name of `out` at the end of the block, in place of what is there, or is removed.

    Raises:
        OSError: the disk refuses it.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    sweep(out.parent)
    aside = _aside(out)
    shutil.rmtree(aside, ignore_errors=True)  # of an earlier process with this number
    try:
        (aside / out.name).mkdir(parents=True)
        with (aside / _LOCK).open("wb") as file:
            _hold(file)
            yield aside / out.name
            publish(aside / out.name, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove the partial files and folders in a folder whose processes have ended; others are left alone."""
    for path, found in _partials(folder):
        if _is_left(path, found["host"], int(found["pid"])):
            _remove_left(path, found["name"])


def being_written(out: Path) -> Path | None:
    """The partial file or folder that a living process will give the name of `out`; None if there is none."""
    sweep(out.parent)
    return next((path for path, found in _partials(out.parent) if found["name"] == out.name and _lock_of(path)), None)


_sweep_once = functools.cache(sweep)  # a folder of ten thousand small files is not listed for each


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.uname().nodename}-{os.getpid()}.partial")


def _hold(file: IO[bytes]) -> None:
    with suppress(OSError):  # a file system without locks: then the process is looked for, see `_is_left`
        lock_now(file)


def _partials(folder: Path) -> list[tuple[Path, re.Match[str]]]:
    with suppress(OSError):  # the folder itself is refused by whoever writes into it
        return [(folder / name, found) for name in os.listdir(folder) if (found := _PARTIAL.fullmatch(name))]
    return []


def _lock_of(path: Path) -> bool:
    """True if a process holds the lock of a partial file or folder."""
    with suppress(OSError), (path / _LOCK if path.is_dir() else path).open("r+b") as file:
        return not lock_now(file)
    return False


def _is_left(path: Path, host: str | None, pid: int) -> bool:
    """True if the process that wrote it has ended. A lock that is free may be about to be taken, so the process is
    looked for too; one of another host cannot be, and is known by its writes."""
    if _lock_of(path):
        return False
    with suppress(OSError):
        if host == os.uname().nodename and not Path(f"/proc/{pid}").exists():
            return True
        newest = max(each.stat().st_mtime for each in (path, *path.rglob("*")))
        return time.time() - newest > _QUIET_SECONDS
    return False


def _remove_left(path: Path, name: str) -> None:
    """Remove it; a folder that was whole, and had moved its predecessor aside, gets its name first."""
    out = path.with_name(name)
    with suppress(OSError):
        if (path / f"{name}-replaced").exists() and not out.exists():
            (path / name).rename(out)
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Have what was written of a file, or the names in a folder, reach the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def existing(path: Path) -> Path:
    """The path, or its nearest parent that is there."""
    path = path.absolute()
    return next(each for each in (path, *path.parents) if each.exists())


def free_bytes(path: Path) -> int:
    """Free space on the disk of a path that need not be there yet."""
    return shutil.disk_usage(existing(path)).free
