"""Atomic writes of files and folders, and locks that end with their process.

A file is written under a temporary name next to its target, synced to disk, and renamed. After a crash, a full disk or
a power cut the target is either the old file or the complete new one.

A lock belongs to an open file: the kernel drops it when the process ends, for any reason. A locked partial file is in
use; an unlocked one was left behind. So the next write into a folder removes leftovers of killed processes.
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

_PARTIAL = re.compile(r"\.(?P<name>.+)\.((?P<host>[^/]+)-)?(?P<pid>\d+)\.partial")  # older versions wrote no host
_LOCK = "lock"  # in a partial folder, next to the folder that will be renamed
_QUIET_SECONDS = 600.0  # an unlocked partial file of another host is a leftover after this time without a write


def reason_of(error: Exception) -> str:
    """Return an error's message, with its type if the message alone says little."""
    says_all = isinstance(error, OSError | ValueError | ImportError | RunError)
    return f"{'' if says_all else f'{type(error).__name__}: '}{getattr(error, 'strerror', None) or error}"


PACKED = (".gz", ".bz2", ".xz", ".zst", ".zstd")  # extensions of compressed files
TABLE_ENDS = (".jsonl", ".tsv", ".csv", ".parquet")  # extensions of labelled tables


def ending(path: Path) -> str:
    """Return the extension that names a file's format, without compression: .jsonl for a.jsonl.zst."""
    return path.with_suffix("").suffix if path.suffix in PACKED else path.suffix


@contextmanager
def os_errors_as(kind: type[Exception], message: str, remedy: str = "", *others: type[Exception]) -> Iterator[None]:
    """Turn an OSError of the context into an error for the user: `WHAT (reason). REMEDY`.

    Args:
        kind: StorageError for files that we write, DataError for the user's, ValueError where the caller handles it.
        message: the file or folder, and the operation that failed.
        remedy: advice for the user.
        others: further types of errors to convert.

    Raises:
        Exception: of this kind.
    """
    kinds: tuple[type[Exception], ...] = (OSError, *others)
    try:
        yield
    except kinds as error:
        text = f"{message} ({reason_of(error)})"
        raise kind(f"{text}. {remedy}" if remedy else text) from error


@contextmanager
def values_as(kind: type[Exception], where: str, *others: type[Exception], after: str = "") -> Iterator[None]:
    """Add the location to a ValueError of the context, for readers of foreign files: `WHERE: REASON` + AFTER.

    Raises:
        Exception: of this kind.
    """
    kinds: tuple[type[Exception], ...] = (ValueError, *others)
    try:
        yield
    except kinds as error:
        raise kind(f"{where}: {error}{after}") from None


@contextmanager
def anything_as(kind: type[RunError], message: str, remedy: str) -> Iterator[None]:
    """Convert any error of a library about a foreign file or a network: `WHAT (first line of the reason). REMEDY`.

    Raises:
        RunError: of this kind; a RunError of the context passes unchanged.
    """
    try:
        yield
    except Exception as error:  # hubs, caches and damaged files raise errors of any type
        if isinstance(error, RunError):
            raise
        raise kind(f"{message} ({first_line(error)[:300]}). {remedy}") from None


@contextmanager
def errors_to(tell: Callable[[str], object], *kinds: type[Exception], before: str = "") -> Iterator[None]:
    """Continue after an error of these types in the context, and report it: BEFORE + its message.

    Args:
        tell: called with the text: `warn`, or `append` of a list of problems.
    """
    try:
        yield
    except kinds as error:
        tell(before + reason_of(error))


def warn(text: str) -> None:
    """Print a warning to standard error."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


@contextmanager
def saying(before: str = "", after: str = "", kind: type[RunError] = RunError) -> Iterator[None]:
    """Extend the message of a RunError of the context, keeping its type: BEFORE + message + AFTER.

    Raises:
        RunError: as the context does.
    """
    try:
        yield
    except kind as error:
        raise type(error)(f"{before}{error}{after}") from error


def lock(file: IO[str] | IO[bytes] | int) -> None:
    """Lock an open file or folder, waiting for its present holder.

    Raises:
        OSError: the file system does not support locks.
    """
    fcntl.flock(file, fcntl.LOCK_EX)


def lock_now(file: IO[str] | IO[bytes] | int, *, shared: bool = False) -> bool:
    """Lock an open file or folder if it is free.

    Args:
        file: the lock is held while it is open.
        shared: allow other shared locks at the same time.

    Returns:
        True if it was free.

    Raises:
        OSError: the file system does not support locks.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(file: IO[str] | IO[bytes] | int) -> None:
    """Release a lock before the file is closed: a process forked in between has inherited it."""
    fcntl.flock(file, fcntl.LOCK_UN)


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically, in UTF-8, replacing an existing one. Unencodable characters become `?`.

    Raises:
        OSError: the disk refuses it; the old file is unchanged and no partial file remains.
    """
    _sweep_once(path.parent)
    with _whole_file(path) as file:
        file.write(text.encode("utf-8", "replace"))


def write_out(path: Path, text: str) -> Path:
    """Write a file that a user named, atomically; return its path.

    Raises:
        StorageError: it cannot be written, and the old file is unchanged; or it is a device, which would be replaced.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise StorageError(f"{path}: cannot be written: it is a device, which a file would replace. Name a file.")
    with os_errors_as(StorageError, f"{path}: cannot be written", "Free space, fix the path, or name another file."):
        write_whole(path, text)
    return path


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Context with an open file that replaces `path` at the end, or is removed on an error.

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
    """Append one line to a file shared by several processes, always as a whole, and sync it to disk.

    If a crash left a partial line, it is ended first, so that the new line is readable.

    Raises:
        OSError: the disk refuses it, and the file is unchanged; or the file is a symlink, which is not followed.
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
    """Rename a complete folder to its final name, once its contents are on disk.

    Args:
        staging: the folder, on the same disk as `out`.
        out: its final name. An existing folder is moved aside, to the name of `staging` plus `-replaced`.

    Returns:
        The folder that was moved aside, for the caller to remove, or None.

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
    """Context with an empty folder that replaces `out` at the end, or is removed on an error.

    Raises:
        OSError: the disk refuses it.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    sweep(out.parent)
    aside = _aside(out)
    shutil.rmtree(aside, ignore_errors=True)  # left by an earlier process with this id
    try:
        (aside / out.name).mkdir(parents=True)
        with (aside / _LOCK).open("wb") as file:
            _hold(file)
            yield aside / out.name
            publish(aside / out.name, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove the partial files and folders in a folder whose processes have ended; keep all others."""
    for path, match in _partials(folder):
        if _is_left(path, match["host"], int(match["pid"])):
            _remove_left(path, match["name"])


def being_written(out: Path) -> Path | None:
    """Return the partial file or folder that a living process will rename to `out`; None without one."""
    sweep(out.parent)
    return next((path for path, match in _partials(out.parent) if match["name"] == out.name and _lock_of(path)), None)


_sweep_once = functools.cache(sweep)  # a folder of ten thousand small files is not listed again for each of them


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.uname().nodename}-{os.getpid()}.partial")


def _hold(file: IO[bytes]) -> None:
    with suppress(OSError):  # without locks, `_is_left` checks whether the process exists
        lock_now(file)


def _partials(folder: Path) -> list[tuple[Path, re.Match[str]]]:
    with suppress(OSError):  # the following write into the folder reports this error
        return [(folder / name, match) for name in os.listdir(folder) if (match := _PARTIAL.fullmatch(name))]
    return []


def _lock_of(path: Path) -> bool:
    """Return True if a process holds the lock of a partial file or folder."""
    with suppress(OSError), (path / _LOCK if path.is_dir() else path).open("r+b") as file:
        return not lock_now(file)
    return False


def _is_left(path: Path, host: str | None, pid: int) -> bool:
    """Return True if the process that wrote it has ended. A free lock may be about to be taken, so the process is
    checked too; on another host that is impossible, so the time of its last write decides."""
    if _lock_of(path):
        return False
    with suppress(OSError):
        if host == os.uname().nodename and not Path(f"/proc/{pid}").exists():
            return True
        newest = max(each.stat().st_mtime for each in (path, *path.rglob("*")))
        return time.time() - newest > _QUIET_SECONDS
    return False


def _remove_left(path: Path, name: str) -> None:
    """Remove a leftover; a complete folder that had moved its predecessor aside is renamed to its target first."""
    out = path.with_name(name)
    with suppress(OSError):
        if (path / f"{name}-replaced").exists() and not out.exists():
            (path / name).rename(out)
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Sync a file's contents, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def existing(path: Path) -> Path:
    """Return the path or its nearest existing parent."""
    path = path.absolute()
    return next(each for each in (path, *path.parents) if each.exists())


def free_bytes(path: Path) -> int:
    """Return the free space on the disk of a path, which need not exist yet."""
    return shutil.disk_usage(existing(path)).free
