"""Kill a prepare command in its middle."""

from __future__ import annotations

import os
import signal
import threading
import time

from tqdm import tqdm

from data_prep.prepare import main


def start(line: list[str]) -> int:
    """Run the command in a fork of this process, which has imported everything; return the fork's process id.

    It gets a separate lock for tqdm: the usual one is shared by forks, and if one is killed while holding it, this
    process would wait for ever.
    """
    child = os.fork()
    if child == 0:
        tqdm.set_lock(threading.RLock())
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os._exit(main(line))
    return child


def run_and_kill(line: list[str], seconds: float) -> bool:
    """Start the command and kill it after this long; return True if it had finished."""
    child = start(line)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1] == 0
