"""Is this machine fit for a start: what its GPUs are doing, and whether the last start of the job blamed it."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from modernbert_train.config.launch import LaunchConfig
from modernbert_train.distributed.gpus import output_of
from modernbert_train.distributed.launched import BLAMED
from modernbert_train.errors import HangError

# NVIDIA, "XID Errors": the GPU has to be reset, or the machine. 48, 64, 95: memory; 74: NVLink; 79: off the bus;
# 119, 120: its own processor does not answer
_FATAL = {48, 64, 74, 79, 95, 119, 120}
_HOUR = 3600.0
_WAIT_SECONDS = 30.0  # the memory of a process that was killed may take so long to be free
_MOST = 0.1  # of its memory, that others may hold: a desktop, a notebook; what a lost run leaves is far more
_XID = re.compile(r"^\[\s*(?P<time>[\d.]+)\].*NVRM: Xid \(PCI:(?P<bus>[0-9A-Fa-f:.]+)\): (?P<number>\d+)")


def refuse_sick_gpus(visible: str | None, ask: Callable[..., str] = output_of, wait: float = _WAIT_SECONDS) -> None:
    """Look at the GPUs that this process is shown, before any rank starts.

    Args:
        visible: CUDA_VISIBLE_DEVICES.
        ask: runs a command; gives its output, or nothing where it cannot be run.
        wait: seconds until memory that others hold counts.

    Raises:
        HangError: one of them cannot be used; so the machine is left out where a scheduler can.
    """
    deadline = time.monotonic() + wait
    while True:
        gpus = [gpu for gpu in _gpus(ask) if visible is None or {gpu["index"], gpu["uuid"]} & set(visible.split(","))]
        taken = [gpu for gpu in gpus if _taken(gpu) > _MOST]
        if not taken or time.monotonic() > deadline:
            break
        time.sleep(1.0)
    host = socket.gethostname()
    for gpu in taken:
        raise HangError(
            f"GPU {gpu['index']} on {host}: {int(gpu['used']) / 1024:.1f} GiB of its memory are in use before the start"
            f"{_by(gpu['uuid'], ask)}. End that process (`nvidia-smi` lists it), or leave the GPU out with "
            "CUDA_VISIBLE_DEVICES."
        )
    for bus, number in _xids(ask):
        for gpu in gpus:
            if gpu["bus"].lower().endswith(bus.lower().split(".")[0] + ".0"):  # on some machines domains alone differ
                raise HangError(
                    f"GPU {gpu['index']} on {host}: the driver reported Xid {number} within the last hour (`dmesg`), "
                    "after which it has to be reset. Reset it (and `dmesg --clear`) or the machine, or leave it out "
                    "with CUDA_VISIBLE_DEVICES."
                )


def _taken(gpu: Mapping[str, str]) -> float:
    """Share of its memory that is in use; 0 where it is not told."""
    known = gpu["used"].isdecimal() and gpu["total"].isdecimal()
    return int(gpu["used"]) / max(1, int(gpu["total"])) if known else 0.0


def _gpus(ask: Callable[..., str]) -> list[dict[str, str]]:
    lines = ask(
        "nvidia-smi", "--query-gpu=index,uuid,pci.bus_id,memory.used,memory.total", "--format=csv,noheader,nounits"
    )
    fields = [[field.strip() for field in line.split(",")] for line in lines.splitlines()]
    names = ("index", "uuid", "bus", "used", "total")
    return [dict(zip(names, each, strict=True)) for each in fields if len(each) == len(names)]


def _by(uuid: str, ask: Callable[..., str]) -> str:
    """Which processes have a GPU; empty where it is not told, as in a container."""
    lines = ask("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name", "--format=csv,noheader")
    fields = [[field.strip() for field in line.split(",")] for line in lines.splitlines()]
    found = [f"process {each[1]} ({each[2]})" for each in fields if len(each) == 3 and each[0] == uuid]
    return f" by {', '.join(found)}" if found else ""


def _xids(ask: Callable[..., str]) -> list[tuple[str, int]]:
    """Of the last hour, the fatal ones; none where this user may not read the kernel's messages."""
    with suppress(OSError, ValueError):
        now = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
        found = [match for line in ask("dmesg").splitlines() if (match := _XID.match(line))]
        recent = [match for match in found if now - float(match["time"]) < _HOUR]
        return [(match["bus"], int(match["number"])) for match in recent if int(match["number"]) in _FATAL]
    return []


def start_notes(launch: LaunchConfig, environment: Mapping[str, str]) -> list[str]:
    """What a scheduler's job should be told at its start, of restarts that will not help or will not come."""
    file, host, notes = environment.get(BLAMED), socket.gethostname(), []
    if file is None:
        return []
    with suppress(OSError):
        if Path(file).read_text(encoding="utf-8").strip().split(".")[0] == host.split(".")[0]:
            notes.append(
                f"warning: the last start of this job failed on this machine, {host}, and it runs there again: the "
                "scheduler did not leave it out. Exclude it (sbatch --exclude), or look at it first."
            )
    if launch.retries == 0:
        notes.append(
            "warning: launch.retries=0: a fault of a GPU or a machine ends this job, and nobody starts it again."
        )
    return notes
