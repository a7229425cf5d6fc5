"""Check this machine before a start: its GPUs, and whether the job's last start failed on it."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from modernbert_train.config.launch import LaunchConfig
from modernbert_train.distributed.launched import BLAMED
from modernbert_train.distributed.visible_gpus import output_of
from modernbert_train.errors import HangError

# NVIDIA, "XID Errors": the GPU or the machine must be reset. 48, 64, 95: memory; 74: NVLink; 79: off the bus;
# 119, 120: the GPU's system processor does not answer
_FATAL = {48, 64, 74, 79, 95, 119, 120}
_HOUR = 3600.0
_WAIT_SECONDS = 30.0  # the driver may take so long to free the memory of a killed process
_MAX_USED = 0.1  # share of a GPU's memory in use: a desktop or a notebook uses less, a leftover run far more
_XID = re.compile(r"^\[\s*(?P<time>[\d.]+)\].*NVRM: Xid \(PCI:(?P<bus>[0-9A-Fa-f:.]+)\): (?P<number>\d+)")


def refuse_sick_gpus(visible: str | None, ask: Callable[..., str] = output_of, wait: float = _WAIT_SECONDS) -> None:
    """Check the visible GPUs before any rank starts.

    Args:
        visible: CUDA_VISIBLE_DEVICES.
        ask: runs a command; returns its output, or an empty text if it cannot run.
        wait: seconds to wait until memory in use is free.

    Raises:
        HangError: a GPU cannot be used; so a scheduler can exclude the machine.
    """
    deadline = time.monotonic() + wait
    while True:
        gpus = [gpu for gpu in _gpus(ask) if visible is None or {gpu["index"], gpu["uuid"]} & set(visible.split(","))]
        taken = [gpu for gpu in gpus if _taken(gpu) > _MAX_USED]
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
            # on some machines only the PCI domains differ
            if gpu["bus"].lower().endswith(bus.lower().split(".")[0] + ".0"):
                raise HangError(
                    f"GPU {gpu['index']} on {host}: the driver reported Xid {number} within the last hour (`dmesg`), "
                    "after which it has to be reset. Reset it (and `dmesg --clear`) or the machine, or leave it out "
                    "with CUDA_VISIBLE_DEVICES."
                )


def _taken(gpu: Mapping[str, str]) -> float:
    """Return the share of a GPU's memory in use; 0 if unknown."""
    is_reported = gpu["used"].isdecimal() and gpu["total"].isdecimal()
    return int(gpu["used"]) / max(1, int(gpu["total"])) if is_reported else 0.0


def _query(ask: Callable[..., str], query: str, **names: str) -> list[dict[str, str]]:
    """Return the rows of an nvidia-smi query; `names` gives its field for each name."""
    lines = ask("nvidia-smi", f"--query-{query}={','.join(names.values())}", "--format=csv,noheader,nounits")
    rows = [[field.strip() for field in line.split(",")] for line in lines.splitlines()]
    return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]


def _gpus(ask: Callable[..., str]) -> list[dict[str, str]]:
    return _query(ask, "gpu", index="index", uuid="uuid", bus="pci.bus_id", used="memory.used", total="memory.total")


def _by(uuid: str, ask: Callable[..., str]) -> str:
    """Name the processes on a GPU; empty if unknown, as in a container."""
    rows = _query(ask, "compute-apps", gpu="gpu_uuid", pid="pid", name="process_name")
    processes = [f"process {row['pid']} ({row['name']})" for row in rows if row["gpu"] == uuid]
    return f" by {', '.join(processes)}" if processes else ""


def _xids(ask: Callable[..., str]) -> list[tuple[str, int]]:
    """Return the fatal Xids of the last hour; none if this user may not read the kernel's messages."""
    with suppress(OSError, ValueError):
        now = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
        matches = [match for line in ask("dmesg").splitlines() if (match := _XID.match(line))]
        recent = [match for match in matches if now - float(match["time"]) < _HOUR]
        return [(match["bus"], int(match["number"])) for match in recent if int(match["number"]) in _FATAL]
    return []


def start_notes(launch: LaunchConfig, environment: Mapping[str, str]) -> list[str]:
    """Return warnings for a scheduler's job whose restarts will not help or will not happen."""
    file, host, notes = environment.get(BLAMED), socket.gethostname(), []
    if file is None:
        return []
    with suppress(OSError):
        if Path(file).read_text(encoding="utf-8").strip().split(".")[0] == host.split(".")[0]:
            notes.append(
                f"warning: the last start of this job failed on this machine, {host}, and it runs there again: the "
                "scheduler did not leave it out. Exclude it (sbatch --exclude), or look at it first."
            )
    return notes + [f"warning: {note}" for note in retry_notes(launch)]


def retry_notes(launch: LaunchConfig) -> list[str]:
    """Return a note if the job is never started again."""
    if launch.retries:
        return []
    return ["launch.retries=0: a fault of a GPU or a machine ends this job; the scheduler does not start it again."]
