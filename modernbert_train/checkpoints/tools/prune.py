"""Delete checkpoints beyond checkpoint.keep, and what crashed writes have left.

The newest `keep` are counted among those that are valid, every byte of them read, so that damaged ones never push out
the last one that a run can resume from. Damaged ones stay for a person to look at, unless asked otherwise.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from modernbert_train.checkpoints.manifest import Manifest, kept_steps, read_manifest
from modernbert_train.checkpoints.run_folder import take_lock
from modernbert_train.checkpoints.set_aside import SUPERSEDED, complete, folders_of
from modernbert_train.checkpoints.tools.listing import bytes_in, one_line
from modernbert_train.checkpoints.tools.places import Place
from modernbert_train.checkpoints.tools.restore import BUSY
from modernbert_train.checkpoints.verified import NAME, PARTIAL, partial_folders, step_folders, step_of
from modernbert_train.core.files import os_errors_as
from modernbert_train.core.own_files import require_own_files
from modernbert_train.core.text import plural
from modernbert_train.errors import ConfigError, StorageError


@dataclass(frozen=True)
class Removal:
    """A folder that goes, why, and the bytes in it."""

    folder: Path
    why: str
    bytes: int


def plan_removals(
    place: Place, keep: int, verify: Callable[[Path], object], *, damaged: bool = False, superseded: bool = False
) -> list[Removal]:
    """What would be removed.

    Args:
        place: the run.
        keep: checkpoint.keep.
        verify: reads a whole checkpoint, or raises StorageError.
        damaged: those that are not whole too.
        superseded: what `restore` has set aside too.

    Raises:
        StorageError: there are checkpoints and none is valid, so that each could be what the run is rescued from.
    """
    found: dict[Path, Manifest] = {}
    wrong: dict[Path, str] = {}
    valid: dict[Path, Manifest] = {}
    folders = step_folders(place.checkpoints)
    for folder in reversed(folders):
        try:
            found[folder] = read_manifest(folder)
            if len(valid) < keep or damaged:
                verify(folder)
                valid[folder] = found[folder]
        except StorageError as error:
            wrong[folder] = one_line(str(error))
            found.pop(folder, None)
    if folders and not valid:
        raise StorageError(
            f"{place.checkpoints}: no checkpoint is valid, so nothing is removed.\n  "
            + "\n  ".join(wrong.values())
            + "\nRestore one from a copy first."
        )
    kept = kept_steps(found.values(), keep)
    removals = [
        Removal(folder, f"neither one of the newest {keep} nor kept for good", bytes_in(folder))
        for folder in folders
        if folder in found and found[folder].step not in kept
    ]
    left = partial_folders(place.checkpoints)
    removals += [Removal(path, "left by a write that broke off", bytes_in(path)) for path in left]
    if damaged:
        removals += [Removal(folder, f"damaged: {why}", bytes_in(folder)) for folder, why in wrong.items()]
    if superseded:
        removals += [
            Removal(each, "set aside by `checkpoints restore`", sum(map(bytes_in, [each, *inside])))
            for each, inside in folders_of(place.checkpoints)
        ]
    return sorted(removals, key=lambda each: each.folder)


def prune(
    place: Place,
    keep: int,
    verify: Callable[[Path], object],
    say: Callable[[str], None],
    *,
    damaged: bool = False,
    superseded: bool = False,
    really: bool = False,
) -> None:
    """Remove what is not kept, or say what would be.

    Args:
        place, keep, verify, damaged, superseded: see `plan_removals`.
        say: prints a line.
        really: remove it.

    Raises:
        ConfigError: the run is in use.
        StorageError: see `plan_removals`; or the disk refuses it.
    """
    if not really:
        removals = plan_removals(place, keep, verify, damaged=damaged, superseded=superseded)
        _tell(removals, place, "would be removed", say)
        if removals:
            say("nothing was removed; --yes does it")
        return
    if place.run is None:
        raise ConfigError(f"{place.checkpoints}: not in the folder of a run, whose rules say what is kept.")
    require_own_files(place.run)
    with os_errors_as(StorageError, f"{place.run}: cannot be written", "Fix the permission."):
        lock = take_lock(place.run, BUSY)
    with lock:
        try:
            complete(place.checkpoints)
            removals = plan_removals(place, keep, verify, damaged=damaged, superseded=superseded)
            for each in removals:
                _remove(each.folder)
        except OSError as error:
            raise StorageError(
                f"{error.filename or place.checkpoints}: cannot be removed ({error.strerror}). What was not removed is "
                "as it was; fix the permission and run the same command again."
            ) from None
    _tell(removals, place, "removed", say)


def _remove(folder: Path) -> None:
    """It loses its name first, so that it is never seen in part."""
    if folder.is_symlink():
        folder.unlink()
        return
    if NAME.fullmatch(folder.name):
        folder = folder.rename(folder.with_name(f"{folder.name}{PARTIAL}-removed"))
    shutil.rmtree(folder)
    if folder.parent.name == SUPERSEDED:
        with suppress(OSError):  # there are others
            folder.parent.rmdir()


def _tell(removals: list[Removal], place: Place, what: str, say: Callable[[str], None]) -> None:
    gone = {each.folder for each in removals}
    for each in removals:
        say(f"{each.folder.relative_to(place.checkpoints)}: {each.bytes:,} bytes, {each.why}")
    kept = ", ".join(f"{step_of(folder):,}" for folder in step_folders(place.checkpoints) if folder not in gone)
    total = sum(each.bytes for each in removals)
    say(f"{plural(len(removals), 'folder')}, {total:,} bytes, {what}; the checkpoints of steps {kept or 'none'} stay")
