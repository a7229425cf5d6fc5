"""The GPUs that a machine shows, and whether this process computes on one.

Torch is imported only to ask it: the launcher counts without.
"""

from __future__ import annotations

import ctypes
import glob
import os
import re
import subprocess
from contextlib import suppress

from modernbert_train.errors import ConfigError

# what a CUDA of each major version needs; NVIDIA, "CUDA Compatibility", table of minimum drivers
OLDEST_DRIVERS = {"12": "525", "13": "580"}


def count_gpus() -> int:
    """GPUs that this process is shown: those of CUDA_VISIBLE_DEVICES if it is set, else those of the driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:  # Slurm writes NoDevFiles where a job has none
        return len([name for name in visible.split(",") if re.fullmatch(r"\d+|(GPU|MIG)-.+", name.strip())])
    files = glob.glob("/dev/nvidia[0-9]*")
    return len(files) or output_of("nvidia-smi", "-L").count("GPU ")  # WSL has no such files


def shown_gpus() -> list[tuple[str, int]]:
    """Name and bytes of memory of each GPU that nvidia-smi lists, where this process is shown any; without torch."""
    if not count_gpus():
        return []
    lines = output_of("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits").splitlines()
    rows = [line.rpartition(",") for line in lines]
    return [(name.strip(), int(mib) << 20) for name, _, mib in rows if mib.strip().isdecimal()]  # else [N/A], as on MIG


def use_expandable_segments() -> None:
    """Have torch extend the memory that it holds on a GPU in place, so that less of it lies idle in pieces.

    Only before torch is imported, where there are GPUs, and where nobody has said how torch is to allocate. Without
    NVIDIA's management library torch 2.13 would crash with them.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys() and count_gpus() and _has_nvml():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _has_nvml() -> bool:
    with suppress(OSError):
        ctypes.CDLL("libnvidia-ml.so.1")
        return True
    return False


def driver_version() -> str:
    """Version of the NVIDIA driver; empty if there is none."""
    return output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0].strip()


def output_of(*command: str) -> str:
    """What a program prints; empty if it is absent, fails or takes long."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    return ""


def uses_gpu(asked: str, key: str) -> bool:
    """Whether to compute on a GPU.

    Args:
        asked: auto, cpu or cuda.
        key: that says so, for errors.

    Raises:
        ConfigError: a GPU was asked for and torch sees none; or it was left open, and torch sees none on a machine
            that shows some: its user would wonder for days why it is slow.
    """
    import torch

    if asked == "cpu":
        return False
    if torch.cuda.is_available():
        return True
    shown = count_gpus()
    if asked == "auto" and not shown:
        return False
    this = f"this machine shows {shown} GPU{'s' if shown > 1 else ''}, but torch sees none" if shown else "no GPU here"
    raise ConfigError(
        f"{key}={asked}: {this}. {why_torch_sees_none(driver_version(), str(torch.__version__), built_for())} "
        f"Install a driver and a torch that fit each other (requirements/README.md), or set {key}=cpu if the CPU is "
        "meant."
    )


def built_for() -> str:
    """The platform of this torch: CUDA or ROCm with its version, or CPUs."""
    import torch

    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    return "CPUs" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"


def why_torch_sees_none(driver: str, torch_version: str, platform: str) -> str:
    """The versions, and what does not fit.

    Args:
        driver: its version; empty if nvidia-smi knows none.
        torch_version: as torch tells it.
        platform: see `built_for`.
    """
    kind, _, version = platform.partition(" ")
    has = f"NVIDIA driver {driver}" if driver else "nvidia-smi finds no NVIDIA driver"
    oldest = OLDEST_DRIVERS.get(version.split(".")[0]) if kind == "CUDA" else None
    needs = f", which needs driver {oldest} or newer" if oldest else ""
    return f"{has}; torch {torch_version} is built for {platform}{needs}."
