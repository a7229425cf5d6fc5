"""A temporary folder for each process, removed when it ends; leftovers of killed processes are removed by later ones.

A killed process cannot clean up. So its folder is locked while the process or one of its data workers lives: the kernel
releases the lock, and a process that can take the lock knows that the folder is unused.
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

PREFIX = "mbtrain-scratch-"  # unique to this package, since such folders are removed
# Python puts sockets into a temporary folder, and a socket's path may have at most 107 characters
LONGEST = 107 - len("/pymp-12345678/listener-12345678")

_mine: tuple[int, Path] | None = None  # process and folder


def folder() -> Path:
    """Return the folder of this process, created on first use."""
    global _mine
    if _mine is None or _mine[0] != os.getpid():
        remove_dead()
        _mine = (os.getpid(), _make())
        remove = partial(shutil.rmtree, _mine[1], ignore_errors=True)
        Finalize(None, remove, exitpriority=-100)  # after multiprocessing has ended the data workers that use it
        stop_signals.do_before_a_stop(remove)
    return _mine[1]


def use_for_temporary_files() -> None:
    """Put temporary files of this process and its children into its folder; torch's compile cache stays shared.

    For programs only, not for libraries. A rank uses its launcher's folder.
    """
    try:
        before, mine = tempfile.gettempdir(), str(folder())
    except OSError:  # not writable: reported by the first user of the folder
        return
    if len(mine) > LONGEST:
        return
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(before, f"torchinductor_{os.getuid()}"))
    os.environ["TMPDIR"] = tempfile.tempdir = mine


def remove_dead() -> None:
    """Remove the folders of this user's killed processes."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}????????"):
        with suppress(OSError):  # another user's, or gone; or locks are unsupported here
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
            continue  # another process removed it as a leftover
        with suppress(OSError):  # without locks nothing is removed either
            lock(handle)
        if path.exists():
            return path
        os.close(handle)
