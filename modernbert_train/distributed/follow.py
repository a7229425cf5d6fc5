"""Become a command that gets a signal when the process that started it dies, however it dies.

    python follow.py PARENT SIGNAL COMMAND [ARGUMENT ...]

The kernel sends it, so nobody is left behind. Linux only. This is a program of its own, which imports nothing else,
because code between fork and exec is unsafe in a process with threads.
"""

from __future__ import annotations

import ctypes
import os
import sys

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(sys.argv[2]))
    if os.getppid() != int(sys.argv[1]):  # it died before
        sys.exit(0)
    os.execvp(sys.argv[3], sys.argv[3:])
