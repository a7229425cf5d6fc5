"""A temporary folder for each process, removed when it ends; what a killed process left, the next one removes.

A process that is killed removes nothing. So the folder is locked as long as its process, or a data worker of it, lives:
the kernel lets go of the lock, and whoever can take it knows that nobody needs the folder any more.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path

from modernbert_train.core.files import lock, lock_now
from modernbert_train.distributed import stop_signals

PREFIX = "mbtrain-scratch-"  # of no other folder: it is removed
# Python puts sockets into a temporary folder, and a socket's path has 107 characters at most
LONGEST = 107 - len("/pymp-12345678/listener-12345678")

_mine: tuple[int, Path] | None = None  # process and folder


def folder() -> Path:
    """The folder of this process, made when it is first asked for."""
    global _mine
    if _mine is None or _mine[0] != os.getpid():
        remove_dead()
        _mine = (os.getpid(), _make())
        remove = partial(shutil.rmtree, _mine[1], ignore_errors=True)
        Finalize(None, remove, exitpriority=-100)  # after multiprocessing has ended the data workers, which use it
        stop_signals.do_before_a_stop(remove)
    return _mine[1]


def use_for_temporary_files() -> None:
    """Have this process and what it starts put temporary files into its folder; what torch compiles stays for others.

    For programs alone. A rank uses its launcher's.
    """
    try:
        before, mine = tempfile.gettempdir(), str(folder())
    except OSError:  # no place to write to; who needs one will say so
        return
    if len(mine) > LONGEST:
        return
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(before, f"torchinductor_{os.getuid()}"))
    os.environ["TMPDIR"] = tempfile.tempdir = mine


def remove_dead() -> None:
    """Remove the folders of this user's processes that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}????????"):
        with suppress(OSError):  # another user's, or gone; or nothing can be locked here
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                if lock_now(handle):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)


def _make() -> Path:
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        try:
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)  # stays open until the process ends
        except FileNotFoundError:
            continue  # another process took it for a dead one's
        with suppress(OSError):  # where nothing can be locked, nothing is removed either
            lock(handle)
        if path.exists():
            return path
        os.close(handle)
