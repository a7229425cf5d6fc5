"""Cache the result of reading a file while the file is unchanged.

The lengths of a large corpus take gigabytes, and several packages compare them with the card. Each process reads once.
Within a process a file counts as unchanged while its size, times and inode are the same; a file written just now is not
cached, because its next change could have the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

_TICK_NS = 100_000_000  # file times are coarser than writes: 10 ms at most on Linux's own file systems

T = TypeVar("T")


class _Identity(NamedTuple):
    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int  # ctime: a copy that preserves times cannot preserve it


_known: dict[tuple[Callable[[Path], Any], Path], tuple[_Identity, Any]] = {}
_asked: set[Path] = set()


def read_once(path: Path, read: Callable[[Path], T]) -> T:
    """Return `read(path)`, or its cached result if the file is unchanged.

    Args:
        path: a file.
        read: a module-level function that reads only this file; its result is shared, so callers must not modify it.
            Errors are not cached.
    """
    before, key = _identity(path), (read, path.absolute())
    _asked.add(key[1])
    cached = _known.get(key)
    if cached is not None and cached[0] == before:
        return cached[1]
    value = read(path)
    if before is not None and before == _identity(path) and _is_settled(before):
        _known[key] = (before, value)
    return value


@contextmanager
def asked_for() -> Iterator[set[Path]]:
    """Context that yields the set of files requested within it."""
    global _asked
    before, _asked = _asked, set()
    try:
        yield _asked
    finally:
        _asked = before


def known(read: Callable[[Path], T], paths: Iterable[Path]) -> list[tuple[str, tuple[int, ...], T]]:
    """Return cached results for some files, to be passed to `learn` in another process of this machine."""
    cached = [(path, _known[read, path]) for path in sorted(paths) if (read, path) in _known]
    return [(str(path), tuple(identity), value) for path, (identity, value) in cached]


def learn(read: Callable[[Path], T], others: Iterable[tuple[str, tuple[int, ...], T]]) -> None:
    """Add results from another process of this machine to the cache; skip files that differ here."""
    for path, identity, value in others:
        if _identity(Path(path)) == identity:
            _known[read, Path(path)] = (_Identity(*identity), value)


def _identity(path: Path) -> _Identity | None:
    """Return a file's identity; None if it is missing or cannot be examined, which `read` will report."""
    with suppress(OSError):
        stat = path.stat()
        return _Identity(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    return None


def _is_settled(identity: _Identity) -> bool:
    return time.time_ns() - max(identity.modified_ns, identity.changed_ns) > _TICK_NS
