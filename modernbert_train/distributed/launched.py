"""Facts about a process's launcher, and which of several processes prints a line that is needed once."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from modernbert_train.errors import ConfigError

BEATS_FOLDER = "MODERNBERT_TRAIN_BEATS"  # set by launch/run.py: each rank touches its file in this folder
STORE = "MODERNBERT_TRAIN_STORE"  # set by launch/run.py: HOST:PORT of the store of all launchers of the run
BLAMED = "MODERNBERT_TRAIN_BLAMED"  # set by a job file: a file to receive the name of the machine at fault
LEFT = "left"  # follows the process id in a heartbeat file: the rank has left and may take its time to end


_UNSET = "Unset it (`unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE`)"
LEFT_OVER = f"{_UNSET}, or start with `launch` or torchrun."


def from_launcher(name: str, default: int) -> int:
    """Return the number that a launcher has set in the environment, or the default.

    Raises:
        ConfigError: the value is not a number, for example a leftover of another program.
    """
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r} in the environment: a launcher sets a whole number. {LEFT_OVER}")
    return int(text)


def refuse_ranks(command: str) -> None:
    """Refuse to start a command of one process as several ranks. `command`: its name in the message.

    Raises:
        ConfigError: a launcher started this process, or its variables are left over.
    """
    if (world := from_launcher("WORLD_SIZE", 1)) > 1:
        raise ConfigError(
            f"WORLD_SIZE={world} in the environment: {command} is one process, which starts others itself. {_UNSET}, "
            "or start it without torchrun."
        )


def check_launch_variables() -> None:
    """Check the environment variables of a multi-process start, before Composer reads them and the ranks meet.

    Raises:
        ConfigError: some are missing or inconsistent, so they are left over from another program.
    """
    rank, world = from_launcher("RANK", 0), from_launcher("WORLD_SIZE", 1)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"):
        from_launcher(name, 0)
    if world > 1 and not (port := from_launcher("MASTER_PORT", 1)) < 1 << 16:
        raise ConfigError(f"MASTER_PORT={port} in the environment: ports end at 65,535. {LEFT_OVER}")
    if rank >= world:
        raise ConfigError(f"RANK={rank} with WORLD_SIZE={world} in the environment: ranks count from 0. {LEFT_OVER}")
    required = ["RANK", "LOCAL_RANK", *([] if STORE in os.environ else ["MASTER_ADDR", "MASTER_PORT"])]
    missing = [name for name in required if not os.environ.get(name)]
    if world > 1 and missing:
        names = ", ".join(missing)
        raise ConfigError(f"WORLD_SIZE={world} in the environment without {names}, which launchers set. {LEFT_OVER}")


def speaks_for_all() -> bool:
    """Return True in the process that prints messages common to all ranks: the first rank, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def tells_signals() -> bool:
    """Return True if this process announces stop signals; our launcher would have announced them already."""
    return speaks_for_all() and BEATS_FOLDER not in os.environ


def note_blamed(host: str) -> None:
    """Write the machine at fault to the job file's path; the job then excludes this machine."""
    file = os.environ.get(BLAMED)
    if file:
        with suppress(OSError):  # the job restarts anyway
            Path(file).write_text(f"{host}\n", encoding="utf-8")
