"""Predict NCCL's transport between machines: RDMA (InfiniBand or RoCE), or TCP, its silent fallback.

NCCL reports it only with NCCL_DEBUG=INFO. The conditions are public: the verbs library, devices with an active port,
and their files in /dev. They are checked here, below a root folder that a test can create. NCCL's environment
variables: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
"""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

VERBS = "libibverbs.so.1"
PLUGIN = "libnccl-net.so"
_ENOUGH_LOCKED = 1 << 30  # bytes; NCCL registers buffers of some megabytes for each connection
_IPC_LOCK = 1 << 14  # capability bit
_REMEDY = "docs/clusters.md, InfiniBand and RoCE, lists the requirements; NCCL_IB_DISABLE=1 means that TCP is intended."


@dataclass(frozen=True)
class Transport:
    """The transport that NCCL will use between machines.

    Attributes:
        text: its name, for the banner.
        warning: why it is slower than possible, or will fail, with a remedy; None if all is well.
    """

    text: str
    warning: str | None = None


def can_load(library: str) -> bool:
    """Return True if the dynamic linker finds a library, as NCCL would."""
    with suppress(OSError):
        ctypes.CDLL(library)
        return True
    return False


def locks_memory() -> bool:
    """Return True if this process may lock as much memory as RDMA registers."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= _ENOUGH_LOCKED:
        return True
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return bool(int(fields.get("CapEff", "0"), 16) & _IPC_LOCK)


def find_transport(
    environment: Mapping[str, str],
    root: Path = Path("/"),
    loads: Callable[[str], bool] = can_load,
    locks: Callable[[], bool] = locks_memory,
) -> Transport:
    """Return NCCL's transport between machines.

    Args:
        environment: of the ranks.
        root: file system root with sys and dev.
        loads: returns True if a library can be loaded.
        locks: returns True if enough memory can be locked.
    """
    net = environment.get("NCCL_NET", "")
    plugin = environment.get("NCCL_NET_PLUGIN", "")
    if net not in ("", "IB", "Socket"):
        return Transport(f"{net} (NCCL_NET)")
    if not net and plugin != "none" and (plugin or loads(PLUGIN)):
        return Transport(f"network plugin {plugin or PLUGIN}")
    tcp = f"TCP over {_interfaces(environment, root)}"
    for name, value in (("NCCL_NET", "Socket"), ("NCCL_IB_DISABLE", "1")):
        if environment.get(name) == value:
            return Transport(f"{tcp} ({name}={value})")
    reason, devices = _devices(environment.get("NCCL_IB_HCA", ""), root)
    if devices and not loads(VERBS):
        reason, devices = f"{VERBS} cannot be loaded (packages libibverbs1 and ibverbs-providers)", []
    if not devices:
        end = "NCCL_NET=IB then ends with an error" if net == "IB" else f"NCCL will use {tcp}, which is slow"
        return Transport(tcp, f"no RDMA between machines: {reason}; {end}. {_REMEDY}")
    text = f"RDMA over {', '.join(devices)}"
    if not locks():
        return Transport(text, f"{text}: locked memory is limited, see `ulimit -l`, so NCCL may fail. {_REMEDY}")
    return Transport(text)


def warn_of_slow_network() -> None:
    """Warn on stderr if this machine's NCCL will not use RDMA between machines, or may fail to."""
    warning = find_transport(os.environ).warning
    if warning is not None:
        print(f"warning: {socket.gethostname()}: {warning}", file=sys.stderr, flush=True)


def _devices(pattern: str, root: Path) -> tuple[str, list[str]]:
    """Return why RDMA is unusable (empty if it is usable), and the usable devices with their links."""
    folder = root / "sys/class/infiniband"
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if not names:
        return "no device in /sys/class/infiniband", []
    chosen = [name for name in names if _is_chosen(name, pattern)]
    if not chosen:
        return f"NCCL_IB_HCA={pattern} leaves none of {', '.join(names)}", []
    devices, reasons = [], []
    for name in chosen:
        ports = sorted((folder / name / "ports").glob("*"))
        active = [port for port in ports if "ACTIVE" in _line(port / "state")]
        nodes = [root / "dev/infiniband" / path.name for path in (folder / name / "device/infiniband_verbs").glob("*")]
        if not active:
            reasons.append(f"no port of {name} is active")
        elif not any(os.access(node, os.R_OK | os.W_OK) for node in nodes):
            reasons.append(f"{name} lacks a file in /dev/infiniband that this user may open")
        else:
            kind = "RoCE" if _line(active[0] / "link_layer") == "Ethernet" else "InfiniBand"
            devices.append(f"{name} ({kind}, {_line(active[0] / 'rate') or 'unknown rate'})")
    return "; ".join(reasons), devices


def _is_chosen(name: str, pattern: str) -> bool:
    """Match NCCL_IB_HCA: prefixes of names, with `=` whole names, with `^` all others; ports are ignored."""
    exclude = pattern.startswith("^")
    listed = pattern.removeprefix("^")
    exact = listed.startswith("=")
    devices = [part.partition(":")[0] for part in listed.removeprefix("=").split(",") if part]
    if not devices:
        return True
    return any(name == part if exact else name.startswith(part) for part in devices) != exclude


def _interfaces(environment: Mapping[str, str], root: Path) -> str:
    """Return NCCL's interfaces for TCP: the configured ones, else ib*, else all except docker* and lo, else any."""
    named = environment.get("NCCL_SOCKET_IFNAME")
    if named:
        return f"NCCL_SOCKET_IFNAME={named}"
    folder = root / "sys/class/net"
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    names = [name for name in names if _line(folder / name / "operstate") in ("up", "unknown")]
    infiniband = [name for name in names if name.startswith("ib")]
    others = [name for name in names if not name.startswith(("docker", "lo"))]
    return ", ".join(infiniband or others or names) or "an unknown interface"


def _line(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8").strip()
    return ""
