"""Folders of strangers: what is in them is read, and what they only point to is not.

A folder of shards or of a model can come out of an archive, and an archive can hold links: one named like a file of a
tokenizer, to a key in somebody's home, would be copied into the next export and published with it. A folder may itself
be a link, because whoever typed its name chose it.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from modernbert_train.errors import DataError, RunError


def require_own_files(folder: Path, kind: type[RunError] = DataError) -> None:
    """Refuse a folder with a link to a file elsewhere, or with what is no file at all; below it nothing is looked at.

    The hub's cache, where the files of snapshots/REVISION are links into blobs/ beside it, counts as one folder. A
    folder that is not there is left to whoever reads it.

    Raises:
        RunError: of this kind; names the link and where it goes.
    """
    try:  # what the folder itself says to be a file is none of this: of 200,000 shards none is looked at
        others = [entry for entry in os.scandir(folder) if not entry.is_file(follow_symlinks=False)]
        entries = [(Path(entry.path), entry.is_symlink()) for entry in others if not entry.is_dir()]
    except OSError:
        return
    homes = _homes(folder)
    for path, is_link in entries:
        target = path.resolve()
        if is_link and not any(target.is_relative_to(each) for each in homes):
            raise kind(
                f"{path}: a link to {target}, outside its folder, which is not followed. Put the file itself there; or "
                "move the whole folder, and name it or link to it as a whole."
            )
        if _is_endless(target):
            raise kind(f"{path}: a pipe or a device and not a file. Remove it, or restore the folder from a copy.")


def require_own_file(path: Path, folder: Path) -> None:
    """Refuse a file, at any depth below a folder, that is a link to elsewhere or no file at all. As above."""
    target = path.resolve()
    if not any(target.is_relative_to(each) for each in _homes(folder)):
        raise DataError(
            f"{path}: a link to {target}, outside {folder}, which is not followed. Put the file itself there."
        )
    if _is_endless(target):
        raise DataError(f"{path}: a pipe or a device and not a file. Remove it, or restore the folder from a copy.")


def _homes(folder: Path) -> list[Path]:
    """Where the files of a folder may lie: in it, and for one of the hub's cache in the blobs of its repository."""
    home = folder.resolve()
    return [home, *(each.parents[1] / "blobs" for each in (home, *home.parents) if each.parent.name == "snapshots")]


def _is_endless(path: Path) -> bool:
    """Whether reading might never end; a file that is not there is told by whoever needs it."""
    with suppress(OSError):
        mode = path.stat().st_mode
        return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)
    return False
