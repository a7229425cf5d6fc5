"""A machine that cannot train is named before the start: otherwise it runs out of memory in its first step, again."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import nullcontext
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


def fallen(domain: int) -> Callable[..., str]:
    """Stand in on a GB200, whose GPUs are all bus 01, each of a different domain."""
    line = f"[{UPTIME - 60:12.6f}] NVRM: Xid (PCI:000{domain}:01:00): 79, GPU has fallen off the bus.\n"
    gpus = "0, GPU-aa, 00000008:01:00.0, 4, 81559\n1, GPU-bb, 00000009:01:00.0, 4, 81559\n"
    return lambda *command: line if command[0] == "dmesg" else gpus


XID = rf"GPU {{}} on {HERE}: the driver reported Xid {{}} within the last hour"
HELD = rf"GPU 1 on {HERE}: 70.0 GiB .* by process 4242 \(python\)\. End"
HOLDS = machine(used=71_680, by="GPU-bb, 4242, python\n")


@pytest.mark.parametrize(
    ("visible", "ask", "message"),
    [
        # a program's MMU fault is harmless; a desktop, a notebook or a small run may use some memory
        pytest.param(None, machine(used=6000), None, id="healthy"),
        pytest.param(None, lambda *command: "", None, id="no nvidia-smi and no permission to read messages"),
        (None, HOLDS, HELD),
        ("0,1", HOLDS, HELD),
        ("GPU-bb", HOLDS, HELD),
        (None, machine(xid=48), XID.format(1, 48)),
        (None, machine(xid=79), XID.format(1, 79)),
        ("0", machine(used=71_680, xid=79), None),
        pytest.param(None, machine(xid=79, ago=4000), None, id="long ago"),
        (None, fallen(8), XID.format(0, 79)),
        ("1", fallen(8), None),
        (None, fallen(9), XID.format(1, 79)),
        ("0", fallen(9), None),
    ],
)
def test_a_gpu_that_cannot_train_is_named_with_its_reason(
    visible: str | None, ask: Callable[..., str], message: str | None
) -> None:
    with pytest.raises(HangError, match=message) if message else nullcontext() as error:
        refuse_sick_gpus(visible, ask, wait=0)
    assert error is None or error.value.exit_code == 124


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
