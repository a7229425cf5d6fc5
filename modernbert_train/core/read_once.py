"""Cache what a file says for as long as the file stays as it is.

Lengths of a large corpus are gigabytes, and several rooms ask whether they are what the card says. A new process reads
anew. Within one, a file counts as unchanged while its size, its times and its inode are the same; one that was written
a moment ago is not remembered, because its next change could carry the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

_TICK_NS = 100_000_000  # times of a file are coarser than its writes: 10 ms at most on Linux's own file systems

T = TypeVar("T")


class _Identity(NamedTuple):
    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int  # what a copy with its times cannot carry over


_known: dict[tuple[Callable[[Path], Any], Path], tuple[_Identity, Any]] = {}
_asked: set[Path] = set()


def read_once(path: Path, read: Callable[[Path], T]) -> T:
    """`read(path)`, or what it gave before if the file is as it was then.

    Args:
        path: a file.
        read: a function of a module, which reads this file and nothing else; what it gives is shared by all who ask, so
            nobody may change it. What it raises is not remembered.
    """
    before, key = _identity(path), (read, path.absolute())
    _asked.add(key[1])
    known = _known.get(key)
    if known is not None and known[0] == before:
        return known[1]
    value = read(path)
    if before is not None and before == _identity(path) and _is_settled(before):
        _known[key] = (before, value)
    return value


@contextmanager
def asked_for() -> Iterator[set[Path]]:
    """The files that are asked for within."""
    global _asked
    before, _asked = _asked, set()
    try:
        yield _asked
    finally:
        _asked = before


def known(read: Callable[[Path], T], paths: Iterable[Path]) -> list[tuple[str, tuple[int, ...], T]]:
    """What has been read of some files, for another process of this machine to `learn`."""
    found = [(path, _known[read, path]) for path in sorted(paths) if (read, path) in _known]
    return [(str(path), tuple(identity), value) for path, (identity, value) in found]


def learn(read: Callable[[Path], T], others: Iterable[tuple[str, tuple[int, ...], T]]) -> None:
    """Take over what another process of this machine has read; of files that are not the same here, nothing."""
    for path, identity, value in others:
        if _identity(Path(path)) == identity:
            _known[read, Path(path)] = (_Identity(*identity), value)


def _identity(path: Path) -> _Identity | None:
    """None where there is no file, or none that can be looked at: that is for `read` to tell."""
    with suppress(OSError):
        stat = path.stat()
        return _Identity(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    return None


def _is_settled(identity: _Identity) -> bool:
    return time.time_ns() - max(identity.modified_ns, identity.changed_ns) > _TICK_NS
