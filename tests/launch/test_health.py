"""A machine that cannot train is named before the start: otherwise it runs out of memory in its first step, again."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch.health import refuse_sick_gpus, start_notes
from launch.ranks import _report
from launch.run import main
from modernbert_train.config.launch import LaunchConfig
from modernbert_train.distributed.launched import BLAMED
from modernbert_train.errors import HangError
from tests.support.tiny_run import TinyRun
from tests.support.waiting import stand_in

HERE = socket.gethostname()
UPTIME = float(Path("/proc/uptime").read_text().split()[0])


def machine(used: int = 4, xid: int = 0, ago: float = 60, by: str = "") -> Callable[..., str]:
    """Return a stand-in for nvidia-smi and dmesg on a machine of two GPUs, whose second one has a fault."""

    def ask(*command: str) -> str:
        if command[0] == "dmesg":
            other = f"[{UPTIME - ago:12.6f}] NVRM: Xid (PCI:0000:5e:00): 31, pid=77, name=python, MMU fault\n"
            return other + f"[{UPTIME - ago:12.6f}] NVRM: Xid (PCI:0000:5e:00): {xid}, GPU has fallen off the bus.\n"
        if "compute-apps" in command[1]:
            return by
        return f"0, GPU-aa, 00000000:3B:00.0, 4, 81559\n1, GPU-bb, 00000000:5E:00.0, {used}, 81559\n"

    return ask


def test_a_healthy_machine_starts() -> None:
    """A program's MMU fault is harmless; a desktop, a notebook or a small run may use some memory."""
    refuse_sick_gpus(None, machine(used=6000), wait=0)
    refuse_sick_gpus(
        None, lambda *command: "", wait=0
    )  # without nvidia-smi, and without permission to read the kernel's messages


@pytest.mark.parametrize("visible", [None, "0,1", "GPU-bb"])
def test_memory_that_others_hold_is_reported_with_its_process(visible: str | None) -> None:
    with pytest.raises(HangError, match=rf"GPU 1 on {HERE}: 70.0 GiB .* by process 4242 \(python\)\. End") as error:
        refuse_sick_gpus(visible, machine(used=71_680, by="GPU-bb, 4242, python\n"), wait=0)
    assert error.value.exit_code == 124


@pytest.mark.parametrize("xid", [48, 79])
def test_a_gpu_that_has_to_be_reset_is_reported(xid: int) -> None:
    with pytest.raises(HangError, match=rf"GPU 1 on {HERE}: the driver reported Xid {xid} within the last hour"):
        refuse_sick_gpus(None, machine(xid=xid), wait=0)


@pytest.mark.parametrize("fallen", [0, 1])
def test_gpus_that_differ_in_their_pci_domain_alone_are_distinguished(fallen: int) -> None:
    """A GB200's GPUs are all bus 01, each of a different domain."""
    line = f"[{UPTIME - 60:12.6f}] NVRM: Xid (PCI:000{8 + fallen}:01:00): 79, GPU has fallen off the bus.\n"
    gpus = "0, GPU-aa, 00000008:01:00.0, 4, 81559\n1, GPU-bb, 00000009:01:00.0, 4, 81559\n"
    ask = lambda *command: line if command[0] == "dmesg" else gpus  # noqa: E731
    with pytest.raises(HangError, match=f"GPU {fallen} on {HERE}: the driver reported Xid 79"):
        refuse_sick_gpus(None, ask, wait=0)
    refuse_sick_gpus(str(1 - fallen), ask, wait=0)


def test_what_was_long_ago_or_on_another_gpu_is_no_reason() -> None:
    refuse_sick_gpus("0", machine(used=71_680, xid=79), wait=0)
    refuse_sick_gpus(None, machine(xid=79, ago=4000), wait=0)


def test_the_machine_that_is_blamed_is_noted_and_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm may start the job on it again."""
    file = tmp_path / "blamed"
    monkeypatch.setenv(BLAMED, str(file))

    def report(first_error: dict[str, Any] | None) -> None:
        nothing = {"disconnect": lambda: None, "post_outcome": lambda *_, **__: None}
        watch: Any = SimpleNamespace(first_error=first_error, **nothing)
        _report(watch, 70, "", blames=False)

    for first_error in (None, {"host": "node-1", "blames": False}):  # a network fault: no machine is excluded
        report(first_error)
    assert not file.exists()
    report({"host": f"{HERE}.cluster", "blames": True})
    assert file.read_text() == f"{HERE}.cluster\n"
    (note,) = start_notes(LaunchConfig(), {BLAMED: str(file)})
    assert f"failed on this machine, {HERE}, and it runs there again" in note
    file.write_text("elsewhere\n")
    assert start_notes(LaunchConfig(), {BLAMED: str(file)}) == []
    assert "launch.retries=0" in start_notes(LaunchConfig(retries=0), {BLAMED: str(file)})[0]
    assert start_notes(LaunchConfig(retries=0), {}) == []  # started by hand


@pytest.mark.runs
def test_a_run_of_one_rank_does_not_start_on_a_sick_gpu_and_its_machine_is_noted(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With stand-ins for the tools: one GPU, which fell off the bus a minute ago."""
    line = f"echo '[{UPTIME - 60:12.6f}] NVRM: Xid (PCI:0000:5e:00): 79, GPU has fallen off the bus.'"
    stand_in(tmp_path, "nvidia-smi", "echo '0, GPU-bb, 00000000:5E:00.0, 4, 81559'")
    stand_in(tmp_path, "dmesg", line)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv(BLAMED, str(tmp_path / "blamed"))
    assert main([*tiny_run("compute.device=auto"), "--ranks", "1"]) == 124
    assert "the driver reported Xid 79" in capsys.readouterr().err
    assert (tmp_path / "blamed").read_text() == f"{HERE}\n"
