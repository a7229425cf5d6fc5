"""Facts about a process's launcher, and which of several processes prints a line that is needed once."""

from __future__ import annotations

import os

BEATS_FOLDER = "MODERNBERT_TRAIN_BEATS"  # set by launch/run.py: each rank touches its file in this folder


def speaks_for_all() -> bool:
    """Whether this is the process that says what concerns all ranks alike: the first rank, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def tells_signals() -> bool:
    """Whether this process says that it was asked to stop: a launcher of ours has said so, and by which signal."""
    return speaks_for_all() and BEATS_FOLDER not in os.environ
