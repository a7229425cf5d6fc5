"""Checkpoints that were set aside because the run went back to an older one, and how several are moved as if at once.

RUN/checkpoints/superseded/20261123-001500-back-to-step-00000500/   those that were newer, and metrics.jsonl as it was

A disk renames one folder at a time. So the whole move is written into a journal first, which makes it final, and is
then done; whoever takes the run's lock next completes one that was interrupted. Nothing is deleted.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from modernbert_train.checkpoints.verified import step_folders
from modernbert_train.core.files import os_errors_as, sync, write_whole
from modernbert_train.core.read_json import as_type, read_json
from modernbert_train.errors import StorageError

SUPERSEDED = "superseded"
METRICS = "metrics.jsonl"
JOURNAL = ".restore.json"
_SET = re.compile(r"\d{8}-\d{6}(-\d+)?-back-to-step-(?P<step>\d{8,18})")
_PLACE = re.compile(rf"({SUPERSEDED}/{_SET.pattern}/)?step-\d{{8,18}}")
_RECORD = re.compile(rf"{SUPERSEDED}/{_SET.pattern}/metrics\.jsonl")


@dataclass(frozen=True)
class Move:
    """A move of checkpoints within a run's folder of them; all places are relative to it.

    Attributes:
        folders: from where, to where; in this order.
        metrics: the record that the run's is replaced by; None leaves it.
    """

    folders: list[tuple[str, str]]
    metrics: str | None


def sets(checkpoints: Path) -> list[Path]:
    """Folders of what was set aside, oldest first."""
    place = checkpoints / SUPERSEDED
    return sorted(path for path in place.iterdir() if _SET.fullmatch(path.name)) if place.is_dir() else []


def base_of(folder: Path) -> int:
    """The step that the run went back to when a set was set aside."""
    found = _SET.fullmatch(folder.name)
    assert found is not None
    return int(found["step"])


def new_set(checkpoints: Path, step: int) -> str:
    """A free name for what is set aside when the run goes back to a step, relative to the checkpoints."""
    name = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-back-to-step-{step:08d}"
    number, free = 1, name
    while (checkpoints / SUPERSEDED / free).exists():
        number += 1
        free = name.replace("-back-", f"-{number}-back-")
    return f"{SUPERSEDED}/{free}"


def move(checkpoints: Path, wanted: Move) -> None:
    """Do a move, whole or not at all; the caller holds the run's lock.

    Raises:
        StorageError: the disk refuses it.
    """
    with os_errors_as(
        StorageError,
        f"{checkpoints}: checkpoints cannot be moved",
        "Fix the disk or the permission and run the same command again, which completes what was begun.",
    ):
        write_whole(checkpoints / JOURNAL, json.dumps(asdict(wanted)))
        complete(checkpoints)


def complete(checkpoints: Path) -> bool:
    """Complete a move that was interrupted, if there is one; the caller holds the run's lock.

    Returns:
        Whether there was one.

    Raises:
        StorageError: its journal is damaged.
        OSError: the disk refuses it.
    """
    journal = checkpoints / JOURNAL
    if not journal.exists():
        return False
    try:
        wanted: Move = as_type(Move, read_json(journal))
        for place in (place for pair in wanted.folders for place in pair):
            if not _PLACE.fullmatch(place):
                raise ValueError(f"{place[:60]!r} is no place of a checkpoint")
        if wanted.metrics is not None and not _RECORD.fullmatch(wanted.metrics):
            raise ValueError(f"{wanted.metrics[:60]!r} is no record that was set aside")
    except ValueError as error:
        raise StorageError(
            f"{journal}: damaged; {error}. It lists checkpoints that were being moved by `checkpoints restore`. Look "
            f"at what `checkpoints list` shows, remove this file, and give that command again."
        ) from None
    for source, target in wanted.folders:
        if (checkpoints / target).exists() or not (checkpoints / source).exists():
            continue  # done before it was interrupted
        (checkpoints / target).parent.mkdir(parents=True, exist_ok=True)
        (checkpoints / source).rename(checkpoints / target)
    if wanted.metrics is not None:
        _replace(checkpoints / wanted.metrics, checkpoints.parent / METRICS)
    for folder in {(checkpoints / place).parent for pair in wanted.folders for place in pair}:
        if folder.is_dir():
            sync(folder)
    journal.unlink()
    return True


def keep_record(record: Path, into: Path) -> None:
    """Leave a copy of a record in a set that is about to be filled.

    Raises:
        OSError: the disk refuses it.
    """
    into.mkdir(parents=True, exist_ok=True)
    _replace(record, into / METRICS)


def _replace(source: Path, target: Path) -> None:
    if not source.is_file():
        return
    aside = target.with_name(f".{target.name}.{os.uname().nodename}-{os.getpid()}.partial")
    try:
        shutil.copyfile(source, aside)
        sync(aside)
        aside.replace(target)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def folders_of(checkpoints: Path) -> list[tuple[Path, list[Path]]]:
    """Each set, oldest first, with its checkpoints."""
    return [(each, step_folders(each)) for each in sets(checkpoints)]


def find(checkpoints: Path, name: str, of_set: str | None = None) -> Path | None:
    """A checkpoint of a name among those that were set aside.

    Args:
        checkpoints: the run's folder of them.
        name: of its folder.
        of_set: name of the set; None means the one that was set aside last.
    """
    found = [path for each, inside in folders_of(checkpoints) for path in inside
             if path.name == name and of_set in (None, each.name)]  # fmt: skip
    return found[-1] if found else None
