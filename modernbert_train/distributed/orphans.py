"""End this process when its parent ends, for any reason; Linux only."""

from __future__ import annotations

import ctypes
import os
import signal

from modernbert_train.errors import RunError

LAUNCHER = "MODERNBERT_TRAIN_LAUNCHER"  # environment of a rank: the process id of its launcher

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent is gone, even if it is gone already.

    Args:
        parent: process id of the parent, which started this process from its main thread: that thread's end counts.
    """
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the line above
        os._exit(RunError.exit_code)


def follow_launcher() -> bool:
    """Die with the launcher; return True in a rank that launch/run.py started."""
    launcher = os.environ.pop(LAUNCHER, None)  # not for this process's own children
    if launcher is not None:
        die_with(int(launcher))
    return launcher is not None
