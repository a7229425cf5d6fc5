"""Back to an older checkpoint: the next start of the run resumes from it.

Newer ones are set aside, not removed, with the record as it was; the same command takes the run forth to one of them
again. The run's own record is left to the next start, which drops the lines of later steps as it does at every resume.
In the second home newer copies are set aside too, or the next start would bring them back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from modernbert_train.checkpoints.checkpoint import Checkpoint, folder_of, verify
from modernbert_train.checkpoints.run_folder import take_lock
from modernbert_train.checkpoints.second_home import fetch
from modernbert_train.checkpoints.set_aside import (
    METRICS,
    SUPERSEDED,
    Move,
    base_of,
    complete,
    find,
    keep_record,
    move,
    new_set,
)
from modernbert_train.checkpoints.store import Store
from modernbert_train.checkpoints.tools.places import Place
from modernbert_train.checkpoints.trained_phases import refuse_average
from modernbert_train.checkpoints.verified import step_folders, step_of
from modernbert_train.core.files import os_errors_as
from modernbert_train.core.own_files import require_own_files
from modernbert_train.core.text import plural
from modernbert_train.errors import ConfigError, RunError, StorageError

BUSY = "Its checkpoints are moved only while nobody trains it: stop that job first; it saves and ends with 75."


@dataclass(frozen=True)
class _Target:
    """The checkpoint to go back to, or forth; `base` is the newest step that stays, or comes back, beside it."""

    checkpoint: Checkpoint
    base: int
    aside: Path | None  # the set that it lies in


def restore(
    place: Place, step: int, store: Store | None, say: Callable[[str], None], of_set: str | None = None
) -> None:
    """Make a checkpoint the newest of its run.

    Args:
        place: the run.
        step: of the checkpoint: among those of the run, those that were set aside, or those of the second home.
        store: the second home; None if there is none, or it is to be left alone.
        say: prints a line.
        of_set: name of the set that it was set aside in; None looks first among those of the run.

    Raises:
        ConfigError: the run is in use, or has nothing to go on from.
        StorageError: there is no such checkpoint, or it is damaged, or a disk or store refuses.
    """
    run = place.run
    if run is None:
        raise ConfigError(f"{place.checkpoints}: not in the folder of a run, so there is nothing to restore.")
    require_own_files(run)  # a link would be written through
    with os_errors_as(StorageError, f"{run}: cannot be written", "Fix the permission or the disk."):
        lock = take_lock(run, BUSY)
    with lock:
        with os_errors_as(StorageError, f"{place.checkpoints}: cannot be written", "Fix the disk."):
            if complete(place.checkpoints):
                say("completed a restore that was interrupted")
        target = _find(place, step, of_set, store, say)
        if target.checkpoint.is_average:
            refuse_average(run)
        into = new_set(place.checkpoints, target.base)
        moved_there = _set_aside_copies(store, step, into, say)
        newer = [folder for folder in step_folders(place.checkpoints) if step_of(folder) > target.base]
        if target.aside is None and not newer:
            done = "the copies are set aside" if moved_there else "nothing to do"
            say(f"{folder_of(place.checkpoints, step).name} is the newest checkpoint of {run}: {done}")
        else:
            _move(place.checkpoints, run, target, newer, into, say)
        state = target.checkpoint.state
        say(
            f"the next start of {run} resumes from step {step:,}, {state.tokens:,} tokens, phase {state.phase}; its "
            f"record of later steps is dropped then"
        )


def _find(place: Place, step: int, of_set: str | None, store: Store | None, say: Callable[[str], None]) -> _Target:
    folder = folder_of(place.checkpoints, step)
    look_aside = of_set is not None or not folder.is_dir()
    aside = find(place.checkpoints, folder.name, of_set) if look_aside else None
    try:
        if aside is not None:
            return _Target(verify(aside), base_of(aside.parent), aside.parent)
        if of_set is not None:
            raise StorageError(
                f"{place.checkpoints / SUPERSEDED / of_set}: has no {folder.name}; see `checkpoints list`."
            )
        if look_aside:
            raise place.unknown(step)
        return _Target(verify(folder), step, None)
    except StorageError as error:
        if of_set is None and store is not None and fetch(store, step, place.checkpoints, say):
            say(f"{folder.name} was brought back from {store.url}: {error}")
            return _Target(verify(folder), step, None)
        raise StorageError(f"{error} Nothing was changed; name one that `checkpoints verify` finds valid.") from None


def _set_aside_copies(store: Store | None, step: int, into: str, say: Callable[[str], None]) -> bool:
    """Before anything changes here: if this breaks off the run is as it was."""
    if store is None:
        return False
    there = {each: name for each, name in store.steps().items() if each > step}
    for name in there.values():
        try:
            store.move_folder(name, f"{into}/{name}")
        except RunError as error:
            raise StorageError(
                f"{error} Copies in {store.url} that are newer would be brought back by the next start, so nothing was "
                "changed here. Give the same command again when the store answers; or leave the store out with --local "
                "and start the run with checkpoint.copy_to=null."
            ) from None
    if there:
        say(f"{plural(len(there), 'newer copy').replace('copys', 'copies')} set aside in {store.url}/{into}")
    return bool(there)


def _move(
    checkpoints: Path, run: Path, target: _Target, newer: list[Path], into: str, say: Callable[[str], None]
) -> None:
    step = target.checkpoint.step
    pairs: list[tuple[str, str]] = []
    with os_errors_as(StorageError, f"{checkpoints}: cannot be written", "Fix the disk."):
        if newer:
            keep_record(run / METRICS, checkpoints / into)
            pairs += [(folder.name, f"{into}/{folder.name}") for folder in newer]
        if target.aside is not None:
            inside = step_folders(target.aside)
            back = [folder for folder in inside if step_of(folder) <= step]
            pairs += [(str(folder.relative_to(checkpoints)), folder.name) for folder in back]
            if len(back) < len(inside):  # of the same line, and from now on newer than where the run is
                rest = new_set(checkpoints, step)
                keep_record(target.aside / METRICS, checkpoints / rest)
                pairs += [(str(each.relative_to(checkpoints)), f"{rest}/{each.name}") for each in inside[len(back) :]]
    record = None if target.aside is None else str((target.aside / METRICS).relative_to(checkpoints))
    move(checkpoints, Move(pairs, record))
    if newer:
        names = ", ".join(folder.name for folder in newer)
        say(f"set aside in {checkpoints / into}: {names}. Nothing was removed; `checkpoints restore` takes them back")
    if target.aside is not None:
        say(f"taken back from {target.aside}: {', '.join(folder.name for folder in back)}")
