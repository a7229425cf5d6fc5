"""Run a command that gets a signal when its parent process dies for any reason.

    python follow.py PARENT SIGNAL COMMAND [ARGUMENT ...]

The kernel sends it, so no process is left behind. Linux only. This is a separate program without further imports,
because code between fork and exec is unsafe in a process with threads.
"""

from __future__ import annotations

import ctypes
import os
import sys

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(sys.argv[2]))
    if os.getppid() != int(sys.argv[1]):  # the parent died before the call above
        sys.exit(0)
    os.execvp(sys.argv[3], sys.argv[3:])
