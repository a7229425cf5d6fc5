"""Run a script on a host of the tests: `python on_host.py NAMESPACE NAME FOLDER SCRIPT ARGUMENTS...`.

The process enters the network namespace NAMESPACE and gets the host name NAME. Each file of FOLDER replaces one of the
machine's: `hosts` replaces /etc/hosts, `boot_id` the id of the current boot. Two hosts of the tests can see each
other's processes, unlike real machines; another boot id keeps a program from looking them up.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import subprocess
import sys
from pathlib import Path

FILES = {"hosts": "/etc/hosts", "boot_id": "/proc/sys/kernel/random/boot_id"}
_NEW_NETWORK, _NEW_MOUNTS, _NEW_NAMES = 0x40000000, 0x00020000, 0x04000000  # CLONE_NEWNET, _NEWNS, _NEWUTS


def enter(namespace: str, name: str, folder: str) -> None:
    """Move this process, which must have a single thread, to a host."""
    library = ctypes.CDLL(None, use_errno=True)
    handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    encoded = name.encode()
    for failed in (
        library.setns(handle, _NEW_NETWORK),
        library.unshare(_NEW_MOUNTS | _NEW_NAMES),
        library.sethostname(encoded, len(encoded)),
    ):
        if failed:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.close(handle)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    for file in Path(folder).iterdir():
        subprocess.run(["mount", "--bind", str(file), FILES[file.name]], check=True)


if __name__ == "__main__":
    enter(*sys.argv[1:4])
    sys.argv = sys.argv[4:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
