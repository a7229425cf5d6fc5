"""Processes that end with the one that started them, however it ends, at every moment of theirs. Linux does it."""

from __future__ import annotations

import ctypes
import os
import signal

from modernbert_train.errors import RunError

LAUNCHER = "MODERNBERT_TRAIN_LAUNCHER"  # environment of a rank: the process id of its launcher

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent is gone, which it may be already.

    Args:
        parent: process id of the one that started this process, from its main thread: the end of the thread counts.
    """
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(RunError.exit_code)


def follow_launcher() -> bool:
    """In a rank that launch/run.py started, which is then True: die with it."""
    launcher = os.environ.pop(LAUNCHER, None)  # what this process starts is not the launcher's
    if launcher is not None:
        die_with(int(launcher))
    return launcher is not None
