"""The null device of null_device.c: builds it, runs programs on it, and reads its counters."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

SOURCE = Path(__file__).with_name("null_device.c")
SOURCES = (
    SOURCE,
    *(SOURCE.with_name(f"null_{part}.c") for part in ("nccl", "faults")),
)  # the first includes the others
NAME = "libcuda.so.1"  # the driver, as Triton looks for it
NVML = "libnvidia-ml.so.1"  # the same file, as torch's allocator looks for it


def why_not() -> str | None:
    """Return the reason why this folder's tests cannot run here; None if they can."""
    import torch

    if os.environ.get("CUDA_BUILD") != "1" or torch.version.cuda is None:
        return "needs a CUDA build of torch and no GPU: run `make test-cuda`"
    if shutil.which("gcc") is None:
        return "needs gcc, to build the device that computes nothing"
    return None


def build() -> Path:
    """Return the library, built once for each version of its source, in this environment's folder."""
    sources = b"".join(each.read_bytes() for each in SOURCES)
    folder = Path(sys.prefix, "null_device", hashlib.sha256(sources).hexdigest()[:12])
    library = folder / NAME
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        packages = [Path(next(iter(importlib.import_module(name).__path__))) for name in _WITH_HEADERS]
        headers = [f"-I{package / 'include'}" for package in packages]
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            made = file.name
        command = ["gcc", "-O2", "-shared", "-fPIC", "-w", f"-Wl,-soname,{NAME}", *headers, str(SOURCE), "-o", made]
        subprocess.run([*command, "-lpthread", "-ldl"], check=True)
        os.chmod(made, 0o755)
        with suppress(FileExistsError):  # another process builds it too
            library.with_name(NVML).symlink_to(NAME)
        os.replace(made, library)
    return library


_WITH_HEADERS = ("nvidia.cu13", "triton.backends.nvidia", "nvidia.nccl")


def environment() -> dict[str, str]:
    """Return the environment of a process on the null device."""
    library = build()
    return {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(library.parent),
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "NULL_NCCL_VERSION": _nccl_version(),
    }


def _nccl_version() -> str:
    """Return the version of the NCCL that this torch brings, as ncclGetVersion writes it."""
    major, minor, patch = (int(part) for part in importlib.metadata.version("nvidia-nccl-cu13").split(".")[:3])
    return str(10_000 * major + 100 * minor + patch)


def run(module: str, *words: str, timeout: float = 900, **settings: str) -> Any:
    """Run a module of this folder on the null device; return its last output line, parsed as JSON."""
    command = [sys.executable, "-m", f"tests.cuda_build.{module}", *words]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment() | settings, capture_output=True, text=True, timeout=timeout
    )
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        )
    return json.loads(lines[-1])


class Account:
    """Counters of this process's device: calls by name."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["LD_PRELOAD"].split(":")[-1])

    def reset(self) -> None:
        """Set all counters to 0."""
        self._library.null_device_reset()

    def read(self) -> dict[str, tuple[int, int]]:
        """Return name -> number of calls, and amount: bytes of copies, FLOPs of products, threads of kernels."""
        with tempfile.NamedTemporaryFile("r") as file:
            self._library.null_device_dump(file.name.encode())
            lines = [line.rstrip("\n").split("\t", 2) for line in file]
        return {name: (int(times), int(amount)) for times, amount, name in lines}


def by_kind(account: dict[str, tuple[int, int]]) -> dict[str, int]:
    """Count calls by kind; kernels, products and collectives of all names are added up."""
    found: Counter[str] = Counter()
    for name, (times, _) in account.items():
        kind = name.split()[0]
        found[kind if kind in ("kernel", "triton", "product") else name] += times
    return dict(sorted(found.items()))


def faults(account: dict[str, tuple[int, int]]) -> list[str]:
    return sorted(name for name in account if name.startswith("FAULT"))
