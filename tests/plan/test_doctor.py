"""`doctor` works on a broken installation, and shows nothing private."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from modernbert_train import __version__
from modernbert_train.plan import doctor, trials
from modernbert_train.plan.doctor import Finding
from modernbert_train.plan.trials import Outcome
from modernbert_train.plan.trials.trials_table import TRIALS


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the last words of the commands that would be tried; each succeeds at once. See also test_trials.py."""
    commands: list[str] = []

    def attempt(command: list[str], seconds: float) -> Outcome:
        commands.append(command[-1])
        return Outcome(True, "it computes")

    monkeypatch.setattr(trials, "attempt", attempt)
    return commands


@pytest.mark.runs
def test_the_report_is_one_block_with_versions_and_machine(tried: list[str]) -> None:
    """It is pasted into an issue as it is."""
    lines = "\n".join(doctor.lines()).splitlines()
    assert lines[0] == lines[-1] == "```"
    assert lines[1].startswith(f"modernbert-train {__version__}")
    assert all(line.startswith(("ok    ", "warn  ", "no    ", "      -> ")) for line in lines[2:-1])
    for subject in (
        "python 3.",
        "torch 2.",
        "mosaicml 0.",
        "CPU:",
        "memory:",
        "GPU",
        "kernel sdpa: usable here, tried: it computes",
        "gloo",
        "composer, streaming in files of your own",
        "disk",
    ):
        assert any(subject in line for line in lines), subject


def test_a_package_that_breaks_is_not_called_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 4 breaks, and pip would not install it with this program. An untested torch is reported."""
    found = {"transformers": "4.57.1", "torch": "2.16.0", "numpy": "2.4.0", "datasets": "5.2.0"}
    asked = ["torch>=2.11", "transformers<6,>=5", "numpy", "datasets"]
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: asked)
    monkeypatch.setattr(doctor, "library_version", lambda name: found.get(name, "1.0"))
    lines = list(map(str, doctor.examine(doctor._packages)))
    old = "warn  transformers 4.57.1, and this program needs <6,>=5\n      -> pip install 'transformers<6,>=5'"
    newer = "warn  torch 2.16.0 is newer than 2.15, the newest that this program was tested with\n      -> install"
    assert old in lines
    assert [line for line in lines if line.startswith(newer)] and "ok    numpy 2.4.0" in lines
    assert len(lines) == len(doctor.PACKAGES)


def test_what_cannot_be_used_here_is_not_called_ok_and_says_what_it_needs(tried: list[str]) -> None:
    """Otherwise a user would rent a machine for a kernel that it lacks."""
    refused = {trial.label: reason for trial in TRIALS.values() if (reason := trial.refusal()) is not None}
    found = {str(finding).splitlines()[0]: finding for finding in doctor.examine(doctor._trials)}
    assert len(found) == len(TRIALS) and len(tried) == len(TRIALS) - len(refused)
    for trial in TRIALS.values():
        [line] = [line for line in found if trial.label in line]
        assert line.startswith("no    " if trial.label in refused else "ok    ")
        assert ("not usable here: " in line and found[line].remedy == f"needs {trial.remedy}") == line.startswith("no")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_no_kernel_of_a_gpu_is_tried_or_called_ok(tried: list[str]) -> None:
    text = "\n".join(map(str, doctor.examine(doctor._trials)))
    for label in ("kernel varlen", "kernel flash", "kernel flex", "optim.fused", "backend nccl"):
        assert re.search(
            rf"^no    [a-z ]*{label}: not usable here: .+\n      -> needs an NVIDIA GPU", text, re.MULTILINE
        )
    assert not [command for command in tried if re.search("varlen|flash|flex|fused|nccl", command.rpartition(";")[2])]


def test_what_fails_when_it_is_tried_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that imports, and then computes something wrong, is the reason for a doctor."""
    monkeypatch.setattr(trials, "attempt", lambda command, seconds: Outcome(False, "ArithmeticError: wrong by 1"))
    lines = str(doctor._try("sdpa")).splitlines()
    assert lines[0] == "warn  attention kernel sdpa: not usable here, tried: ArithmeticError: wrong by 1"
    assert lines[1].startswith("      -> needs ")
    [own] = doctor._own_files()
    assert str(own).startswith("warn  ") and own.remedy == "python -m modernbert_train.import_stubs --environment"


def test_a_broken_group_becomes_a_warning_and_keeps_what_came_before() -> None:
    def _gpus() -> Iterator[Finding]:
        yield Finding("GPU 0")
        raise ImportError("/home/someone/libcudart.so: not found")

    found = doctor.examine(_gpus)
    assert [str(f) for f in found] == [
        "ok    GPU 0",
        "warn  gpus: could not be looked up (ImportError)\n      -> install modernbert-train into a new environment",
    ]


@pytest.mark.runs
def test_without_torch_it_still_reports() -> None:
    """A failed installation is the most likely reason to run it."""
    code = (
        "import sys; sys.modules['torch'] = None; from modernbert_train.plan import doctor\n"
        "doctor.GROUPS = [look for look in doctor.GROUPS if look is not doctor._own_files]\n"
        "print(*doctor.lines(), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "warn  processor: could not be looked up (ModuleNotFoundError)" in done.stdout
    assert "warn  trials: could not be looked up (ModuleNotFoundError)" in done.stdout
    assert re.search(r"(ok|warn) +disk here: \d+ of \d+ GB free", done.stdout)  # after those that failed


@pytest.mark.runs
def test_nothing_private_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tried: list[str]) -> None:
    """Keys, paths and host names must not get into a public issue."""
    monkeypatch.setenv("WANDB_API_KEY", "s3cret-key-value")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    text = "\n".join(doctor.lines())
    assert "s3cret" not in text
    assert str(tmp_path) not in text
    assert str(Path(doctor.__file__).parent) not in text
    assert "switched offline" in text


def test_shared_memory_of_a_killed_job_is_found_and_that_of_a_live_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments that a live job has mapped must never be offered for removal."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        pytest.skip("no /dev/shm here")
    segment = folder / "987654_locals"
    segment.write_bytes(b"0" * 64)
    try:
        dead = [str(f) for f in doctor.examine(doctor._shared_memory)]
        assert any("left by a killed job" in text and "rm " in text and "/dev/shm/987654_*" in text for text in dead)
        monkeypatch.setattr(doctor, "_mapped_segments", lambda: {p.name for p in folder.iterdir()})
        assert not any("killed job" in str(f) for f in doctor.examine(doctor._shared_memory))
    finally:
        segment.unlink()


def test_mapped_segments_are_seen() -> None:
    from multiprocessing.shared_memory import SharedMemory

    segment = SharedMemory(name="987653_locals", create=True, size=64)
    try:
        assert "987653_locals" in doctor._mapped_segments()
    finally:
        segment.close()
        segment.unlink()


def test_a_small_limit_on_open_files_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (256, 4096))
    found = [*doctor.examine(doctor._disk)]
    assert str(found[-1]) == "warn  open files: at most 256\n      -> ulimit -n 4096"


def test_a_gpu_of_amd_is_reported_with_its_platform_and_what_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its torch lacks a CUDA version, which would look like a broken installation."""
    gpu = SimpleNamespace(name="AMD Instinct MI300X", total_memory=206_141_652_992, major=9, minor=4)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: gpu)
    monkeypatch.setattr("torch.version.hip", "7.2.0")
    monkeypatch.setattr(doctor, "driver_version", lambda: "")
    first, second = map(str, doctor.examine(doctor._gpus))
    assert (
        first == "ok    GPU 0: AMD Instinct MI300X, 206 GB, capability 9.4, driver unknown, torch built for ROCm 7.2.0"
    )
    assert second.startswith("warn  ROCm: this program has never run on it\n      -> read docs/speed.md#amd-gpus")
