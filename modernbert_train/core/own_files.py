"""Refuse symlinks that lead out of an untrusted folder.

A folder of shards or of a model may come from an archive, and archives can hold symlinks: one named like a tokenizer's
file that points to a key in a home directory would be copied into the next export and published. The folder itself may
be a symlink, since the user typed its name.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from modernbert_train.errors import DataError, RunError


def require_own_files(folder: Path, kind: type[RunError] = DataError) -> None:
    """Refuse a folder with a symlink to outside, a pipe or a device in it; subfolders are not checked.

    The hub's cache, where the files of snapshots/REVISION are links into the neighbouring blobs/, counts as one folder.
    The reader of a missing folder reports it.

    Raises:
        RunError: of this kind; names the link and its target.
    """
    try:  # regular files need no check: with 200,000 shards none is opened
        others = [entry for entry in os.scandir(folder) if not entry.is_file(follow_symlinks=False)]
        entries = [(Path(entry.path), entry.is_symlink()) for entry in others if not entry.is_dir()]
    except OSError:
        return
    homes = _homes(folder)
    for path, is_link in entries:
        target = path.resolve()
        if is_link and not _is_below(target, homes):
            raise kind(
                f"{path}: a link to {target}, outside its folder, which is not followed. Put the file itself there; or "
                "move the whole folder, and name it or link to it as a whole."
            )
        if _is_endless(target):
            raise kind(f"{path}: a pipe or a device and not a file. Remove it, or restore the folder from a copy.")


def require_own_file(path: Path, folder: Path) -> None:
    """Refuse a file, at any depth below a folder, that is a symlink to outside or not a regular file."""
    target = path.resolve()
    if not _is_below(target, _homes(folder)):
        raise DataError(
            f"{path}: a link to {target}, outside {folder}, which is not followed. Put the file itself there."
        )
    if _is_endless(target):
        raise DataError(f"{path}: a pipe or a device and not a file. Remove it, or restore the folder from a copy.")


def special_kind(path: Path, is_link: bool, folder: Path) -> str | None:
    """Return why a file of a folder must not be opened: a link to outside, a pipe or a device; None if it may be."""
    if is_link:
        target = path.resolve()
        if not _is_below(target, [*_homes(folder), *_homes(path.parent)]):
            return "links to files elsewhere"
    return "pipes or devices" if _is_endless(path) else None


def _is_below(target: Path, homes: Iterable[Path]) -> bool:
    return any(target.is_relative_to(each) for each in homes)


def _homes(folder: Path) -> list[Path]:
    """Return the folders that may hold a folder's files: itself, and for the hub's cache its repository's blobs."""
    home = folder.resolve()
    return [home, *(each.parents[1] / "blobs" for each in (home, *home.parents) if each.parent.name == "snapshots")]


def _is_endless(path: Path) -> bool:
    """Return True if reading might never end; the reader of a missing file reports it."""
    with suppress(OSError):
        mode = path.stat().st_mode
        return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)
    return False
