"""Facts about a process's launcher, and which of several processes prints a line that is needed once."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

BEATS_FOLDER = "MODERNBERT_TRAIN_BEATS"  # set by launch/run.py: each rank touches its file in this folder
STORE = "MODERNBERT_TRAIN_STORE"  # set by it: HOST:PORT of the store of all launchers of the run, for the ranks too
BLAMED = "MODERNBERT_TRAIN_BLAMED"  # set by a job file: the machine that is blamed is written there
LEFT = "left"  # after the process id in that file: the rank has left the others, and may take its time to end


def speaks_for_all() -> bool:
    """Whether this is the process that says what concerns all ranks alike: the first rank, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def tells_signals() -> bool:
    """Whether this process says that it was asked to stop: a launcher of ours has said so, and by which signal."""
    return speaks_for_all() and BEATS_FOLDER not in os.environ


def note_blamed(host: str) -> None:
    """Write the machine that an error is blamed on where a job file wants it, which then leaves it out."""
    file = os.environ.get(BLAMED)
    if file:
        with suppress(OSError):  # the job starts again all the same
            Path(file).write_text(f"{host}\n", encoding="utf-8")
