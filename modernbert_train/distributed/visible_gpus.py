"""Find the visible GPUs of this machine, and decide whether this process computes on one.

Torch is imported only where it is needed: the launcher counts GPUs without it.
"""

from __future__ import annotations

import ctypes
import glob
import os
import re
import subprocess
from contextlib import suppress

from modernbert_train.errors import ConfigError

# minimum driver of each CUDA major version; NVIDIA, "CUDA Compatibility", table of minimum drivers
OLDEST_DRIVERS = {"12": "525", "13": "580"}


def count_gpus() -> int:
    """Return the number of visible GPUs: those in CUDA_VISIBLE_DEVICES if it is set, else the driver's."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:  # Slurm writes NoDevFiles for a job without GPUs
        return len([name for name in visible.split(",") if re.fullmatch(r"\d+|(GPU|MIG)-.+", name.strip())])
    files = glob.glob("/dev/nvidia[0-9]*")
    return len(files) or output_of("nvidia-smi", "-L").count("GPU ")  # WSL lacks these files


def shown_gpus() -> list[tuple[str, int]]:
    """Return name and bytes of memory of each GPU in nvidia-smi, if any is visible to this process; without torch."""
    if not count_gpus():
        return []
    lines = output_of("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits").splitlines()
    rows = [line.rpartition(",") for line in lines]
    return [(name.strip(), int(mib) << 20) for name, _, mib in rows if mib.strip().isdecimal()]  # else [N/A], as in MIG


def use_expandable_segments() -> None:
    """Let torch grow its GPU memory segments in place, which reduces fragmentation.

    Only before torch is imported, if there are GPUs, and if the user has not configured the allocator. Without NVIDIA's
    management library torch 2.13 would crash with expandable segments.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys() and count_gpus() and _has_nvml():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _has_nvml() -> bool:
    with suppress(OSError):
        ctypes.CDLL("libnvidia-ml.so.1")
        return True
    return False


def driver_version() -> str:
    """Return the version of the NVIDIA driver; empty without a driver."""
    return output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0].strip()


def output_of(*command: str) -> str:
    """Return a program's output; empty if it is absent, fails or takes long."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    return ""


def uses_gpu(device: str, key: str) -> bool:
    """Return True to compute on a GPU.

    Args:
        device: auto, cpu or cuda.
        key: the key that set it, for errors.

    Raises:
        ConfigError: cuda is configured and torch sees no GPU; or with auto torch sees none on a machine that shows
            some, where the run would silently be slow.
    """
    import torch

    if device == "cpu":
        return False
    if torch.cuda.is_available():
        return True
    shown = count_gpus()
    if device == "auto" and not shown:
        return False
    this = f"this machine shows {shown} GPU{'s' if shown > 1 else ''}, but torch sees none" if shown else "no GPU here"
    raise ConfigError(
        f"{key}={device}: {this}. {why_torch_sees_none(driver_version(), str(torch.__version__), built_for())} "
        f"Install a driver and a torch that fit each other (pytorch.org/get-started), or set {key}=cpu if the CPU is "
        "meant."
    )


def built_for() -> str:
    """Return the platform of this torch: CUDA or ROCm with its version, or CPUs."""
    import torch

    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    return "CPUs" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"


def why_torch_sees_none(driver: str, torch_version: str, platform: str) -> str:
    """Return the versions of driver and torch, and the driver that torch needs.

    Args:
        driver: its version; empty if nvidia-smi knows none.
        torch_version: as torch reports it.
        platform: see `built_for`.
    """
    kind, _, version = platform.partition(" ")
    has = f"NVIDIA driver {driver}" if driver else "nvidia-smi finds no NVIDIA driver"
    oldest = OLDEST_DRIVERS.get(version.split(".")[0]) if kind == "CUDA" else None
    needs = f", which needs driver {oldest} or newer" if oldest else ""
    return f"{has}; torch {torch_version} is built for {platform}{needs}."
