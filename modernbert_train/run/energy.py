"""Energy that a start takes, where the machine counts it: NVML's counter of a GPU, RAPL's of the packages of the CPUs.

Both counters are of the device, not of the process: whatever else runs there is counted too. NVML's is read at the
start and at the end. RAPL's runs over within minutes on a busy machine, so a thread reads it twice a minute; most
systems let only root read it, and then nothing is known.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

POWERCAP = Path("/sys/class/powercap")
_PACKAGE = re.compile(r"intel-rapl:\d+")  # AMD's too; with a second number it is a part of a package
_SECONDS = 30.0


class Energy(NamedTuple):
    """Joules since the meter began; None where nobody counts them.

    Attributes:
        gpu: its identifier; None without one.
        gpu_joules: of that GPU.
        cpu_joules: of all packages of this machine, of the rank that reads them.
    """

    gpu: str | None
    gpu_joules: float | None
    cpu_joules: float | None


class EnergyMeter:
    """Reads what this rank is to read.

    Args:
        gpu: identifier of its GPU; None: it has none.
        packages: whether it reads the CPUs' counters, as one rank of each machine does.
        powercap: where the kernel has them.
    """

    def __init__(self, gpu: str | None, *, packages: bool, powercap: Path = POWERCAP) -> None:
        self._gpu = gpu
        self._count = None if gpu is None else gpu_counter(gpu)
        self._first = None if self._count is None else self._count()
        self._packages = [Package(path) for path in package_folders(powercap)] if packages else []
        self._done = threading.Event()
        if self._packages:
            threading.Thread(target=self._follow, name="energy", daemon=True).start()

    def _follow(self) -> None:
        while not self._done.wait(_SECONDS):
            for package in self._packages:
                package.read()

    def stop(self) -> Energy:
        """What was taken so far; nothing is read afterwards."""
        self._done.set()
        now = None if self._count is None else self._count()
        taken = None if now is None or self._first is None else now - self._first
        packages = [package.read() for package in self._packages]
        known = [each for each in packages if each is not None]
        return Energy(self._gpu, taken, sum(known) if known and len(known) == len(packages) else None)


class Package:
    """The counter of one package of a CPU.

    Args:
        folder: of the kernel.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self._range = int((folder / "max_energy_range_uj").read_text())
        self._last = int(self._file.read_text())
        self._lost = False
        self._joules = 0.0
        self._lock = threading.Lock()

    def read(self) -> float | None:
        """Joules since the first reading; None once a reading failed."""
        with self._lock:
            try:
                now = int(self._file.read_text())
            except (OSError, ValueError):
                self._lost = True
            if self._lost:
                return None
            self._joules += ((now - self._last) % (self._range + 1)) / 1e6  # the counter begins anew at its end
            self._last = now
            return self._joules


def package_folders(powercap: Path) -> list[Path]:
    """Those of packages whose counter can be read."""
    found = []
    try:
        for folder in sorted(powercap.iterdir()):
            if _PACKAGE.fullmatch(folder.name) and (folder / "name").read_text().startswith("package"):
                (folder / "energy_uj").read_text()
                (folder / "max_energy_range_uj").read_text()
                found.append(folder)
    except (OSError, ValueError):
        return []
    return found


def gpu_counter(gpu: str) -> Callable[[], float | None] | None:
    """Reads the joules that a GPU has taken since its driver was loaded; None where NVML does not say.

    Args:
        gpu: its identifier, as torch's properties of a device have it.
    """
    name = gpu if gpu.startswith(("GPU-", "MIG-")) else f"GPU-{gpu}"
    handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)):
            return None
        read = nvml.nvmlDeviceGetTotalEnergyConsumption
    except (OSError, AttributeError):
        return None

    def joules() -> float | None:
        return None if read(handle, ctypes.byref(millijoules)) else millijoules.value / 1e3

    return joules if joules() is not None else None


def total(all_ranks: Iterable[Energy]) -> dict[str, float | None]:
    """Joules of all ranks together, by the names they have in starts.jsonl; a GPU that ranks share counts once."""
    found = list(all_ranks)
    gpus = {each.gpu: each.gpu_joules for each in found if each.gpu is not None}
    known = [joules for joules in gpus.values() if joules is not None]
    cpus = [each.cpu_joules for each in found if each.cpu_joules is not None]
    return {
        "gpu_joules": round(sum(known), 1) if known and len(known) == len(gpus) else None,
        "cpu_joules": round(sum(cpus), 1) if cpus else None,
    }
