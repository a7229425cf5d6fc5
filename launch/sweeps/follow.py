"""Become a command that is asked to stop (SIGTERM) when the process that started it dies, however it dies.

    python launch/sweeps/follow.py PARENT COMMAND [ARGUMENT ...]

A worker of a sweep that is killed cannot stop its trial; so the kernel does it, and the trial saves. Linux only. This
is a program of its own because code between fork and exec is unsafe in a process with threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h


def main() -> None:
    """Replace this process by the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != parent:  # it died before
        sys.exit(0)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
