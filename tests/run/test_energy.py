"""Energy of a start. If this breaks, a run is credited with joules that it did not take, or ends because of them."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from modernbert_train.run import energy
from modernbert_train.run.energy import Energy, EnergyMeter, Package, package_folders, total


def zone(powercap: Path, name: str, title: str, microjoules: int, most: int = 1_000_000) -> Path:
    folder = powercap / name
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{title}\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    (folder / "max_energy_range_uj").write_text(f"{most}\n")
    return folder


def test_a_counter_that_begins_anew_goes_on(tmp_path: Path) -> None:
    """It does so every few minutes on a large machine."""
    folder = zone(tmp_path, "intel-rapl:0", "package-0", 900_000, most=999_999)
    package = Package(folder)
    for now, joules in ((950_000, 0.05), (150_000, 0.25), (150_000, 0.25)):
        (folder / "energy_uj").write_text(str(now))
        assert package.read() == pytest.approx(joules)
    (folder / "energy_uj").unlink()
    assert package.read() is None, "what is not known is not guessed"


def test_packages_are_counted_and_their_parts_are_not(tmp_path: Path) -> None:
    own = [zone(tmp_path, f"intel-rapl:{number}", f"package-{number}", 1) for number in (0, 1)]
    zone(tmp_path, "intel-rapl:0:0", "core", 1)
    zone(tmp_path, "intel-rapl:2", "psys", 1)
    (tmp_path / "intel-rapl").mkdir()
    assert package_folders(tmp_path) == own
    assert package_folders(tmp_path / "absent") == []
    meter = EnergyMeter(None, packages=True, powercap=tmp_path)
    for folder in own:
        (folder / "energy_uj").write_text("500001")
    assert meter.stop() == Energy(None, None, pytest.approx(1.0))
    assert EnergyMeter(None, packages=False, powercap=tmp_path).stop() == Energy(None, None, None)


class FakeNvml:
    """Answers as NVML does, in millijoules; a code other than 0 is a refusal."""

    def __init__(self, refuses: bool = False) -> None:
        self.name, self.count, self.refuses = b"", 5_000, refuses

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:
        self.name = name
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, millijoules: Any) -> int:
        millijoules._obj.value = self.count
        return 3 if self.refuses else 0


def test_a_gpu_is_read_where_nvml_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.setattr(energy.ctypes, "CDLL", lambda name: nvml)
    meter = EnergyMeter("1234-abcd", packages=False)
    nvml.count += 7_500
    assert meter.stop() == Energy("1234-abcd", 7.5, None) and nvml.name == b"GPU-1234-abcd"
    nvml.refuses = True  # GPUs before Volta
    assert EnergyMeter("1234-abcd", packages=False).stop().gpu_joules is None

    def absent(name: str) -> ctypes.CDLL:
        raise OSError(name)

    monkeypatch.setattr(energy.ctypes, "CDLL", absent)
    assert EnergyMeter("1234-abcd", packages=False).stop().gpu_joules is None


def test_a_shared_gpu_counts_once_and_an_unknown_one_makes_the_sum_unknown() -> None:
    ranks = [Energy("a", 10.0, 3.0), Energy("a", 10.0, None), Energy("b", 5.0, None)]
    assert total(ranks) == {"gpu_joules": 15.0, "cpu_joules": 3.0}
    assert total([*ranks, Energy("c", None, None)])["gpu_joules"] is None
    assert total([Energy(None, None, None)]) == {"gpu_joules": None, "cpu_joules": None}
