"""NCCL's network between machines, predicted from file trees like those on real machines.

If this breaks, a job on many machines trains for days over TCP at a tenth of its speed, without a warning.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from modernbert_train.distributed import transport
from modernbert_train.distributed.transport import PLUGIN, VERBS, Transport, can_load, find_transport, locks_memory

NDR = "400 Gb/sec (4X NDR)"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A file system with network interfaces and no RDMA device."""
    for name, state in (("eth0", "up"), ("lo", "unknown"), ("docker0", "up"), ("eth1", "down")):
        (tmp_path / "sys/class/net" / name).mkdir(parents=True)
        (tmp_path / "sys/class/net" / name / "operstate").write_text(f"{state}\n")
    return tmp_path


def add_device(
    root: Path, name: str, *, state: str = "4: ACTIVE", link: str = "InfiniBand", rate: str = NDR, file: bool = True
) -> None:
    number = name.rpartition("_")[2]
    port = root / "sys/class/infiniband" / name / "ports/1"
    port.mkdir(parents=True)
    for key, text in (("state", state), ("link_layer", link), ("rate", rate)):
        (port / key).write_text(f"{text}\n")
    (root / "sys/class/infiniband" / name / "device/infiniband_verbs" / f"uverbs{number}").mkdir(parents=True)
    if file:
        (root / "dev/infiniband").mkdir(parents=True, exist_ok=True)
        (root / "dev/infiniband" / f"uverbs{number}").write_text("")


def verbs(library: str) -> bool:
    return library == VERBS


def told(
    root: Path, *, loads: Callable[[str], bool] = verbs, locks: bool = True, **environment: str
) -> tuple[str, str]:
    found = find_transport(environment, root, loads, lambda: locks)
    return found.text, found.warning or ""


def test_infiniband_and_roce_are_named_with_their_rate(machine: Path) -> None:
    add_device(machine, "mlx5_0")
    add_device(machine, "mlx5_1", link="Ethernet", rate="100 Gb/sec (4X EDR)")
    assert told(machine) == (f"RDMA over mlx5_0 (InfiniBand, {NDR}), mlx5_1 (RoCE, 100 Gb/sec (4X EDR))", "")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (None, "no device in /sys/class/infiniband"),
        ({"state": "1: DOWN"}, "no port of mlx5_0 is active"),
        ({"state": "2: INIT"}, "no port of mlx5_0 is active"),
        ({"file": False}, "mlx5_0 lacks a file in /dev/infiniband that this user may open"),
    ],
)
def test_a_fall_back_to_tcp_is_a_warning_with_its_reason(
    machine: Path, settings: dict[str, str] | None, reason: str
) -> None:
    if settings is not None:
        add_device(machine, "mlx5_0", **settings)  # type: ignore[arg-type]
    text, warning = told(machine)
    assert text == "TCP over eth0"
    assert warning.startswith(f"no RDMA between machines: {reason}; NCCL will use TCP over eth0, which is slow.")
    assert "docs/clusters.md" in warning


def test_an_image_without_the_library_is_named(machine: Path) -> None:
    """The most frequent cause: the devices are there, and NCCL cannot speak to them."""
    add_device(machine, "mlx5_0")
    text, warning = told(machine, loads=lambda library: False)
    assert text == "TCP over eth0" and "libibverbs.so.1 cannot be loaded (packages libibverbs1" in warning


def test_one_usable_device_of_several_is_enough(machine: Path) -> None:
    add_device(machine, "mlx5_0", state="1: DOWN")
    add_device(machine, "mlx5_1")
    assert told(machine) == (f"RDMA over mlx5_1 (InfiniBand, {NDR})", "")


@pytest.mark.parametrize(
    ("wanted", "used"),
    [
        ("mlx5_1", ["mlx5_1", "mlx5_10"]), ("=mlx5_1", ["mlx5_1"]), ("=mlx5_1:1", ["mlx5_1"]), ("^mlx5_1", ["mlx5_0"]),
        ("^=mlx5_1", ["mlx5_0", "mlx5_10"]), ("mlx5_0,mlx5_10", ["mlx5_0", "mlx5_10"]), ("efa", []),
    ],
)  # fmt: skip
def test_the_choice_of_devices_is_respected(machine: Path, wanted: str, used: list[str]) -> None:
    for name in ("mlx5_0", "mlx5_1", "mlx5_10"):
        add_device(machine, name)
    text, warning = told(machine, NCCL_IB_HCA=wanted)
    if used:
        assert text == "RDMA over " + ", ".join(f"{name} (InfiniBand, {NDR})" for name in used) and not warning
    else:
        assert "NCCL_IB_HCA=efa leaves none of mlx5_0, mlx5_1, mlx5_10" in warning


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"NCCL_IB_DISABLE": "1"}, "TCP over eth0 (NCCL_IB_DISABLE=1)"),
        ({"NCCL_NET": "Socket"}, "TCP over eth0 (NCCL_NET=Socket)"),
        ({"NCCL_NET": "AWS Libfabric"}, "AWS Libfabric (NCCL_NET)"),
        ({"NCCL_NET_PLUGIN": "gib"}, "network plugin gib"),
        (
            {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "eth1"},
            "TCP over NCCL_SOCKET_IFNAME=eth1 (NCCL_IB_DISABLE=1)",
        ),
    ],
)
def test_a_requested_setting_is_no_warning(machine: Path, environment: dict[str, str], text: str) -> None:
    add_device(machine, "mlx5_0")
    assert told(machine, **environment) == (text, "")


def test_a_plugin_that_lies_in_the_way_of_the_linker_is_used(machine: Path) -> None:
    assert told(machine, loads=lambda library: library == PLUGIN) == (f"network plugin {PLUGIN}", "")
    assert told(machine, loads=lambda library: library == PLUGIN, NCCL_NET_PLUGIN="none")[0] == "TCP over eth0"


def test_rdma_that_is_required_and_missing_is_reported(machine: Path) -> None:
    assert "NCCL_NET=IB then ends with an error" in told(machine, NCCL_NET="IB")[1]


def test_too_little_locked_memory_is_reported(machine: Path) -> None:
    """The devices are there, and registering memory with them fails in the first collective."""
    add_device(machine, "mlx5_0")
    text, warning = told(machine, locks=False)
    assert text.startswith("RDMA over mlx5_0") and "`ulimit -l`" in warning


def test_ip_over_infiniband_is_what_nccl_takes_first(machine: Path) -> None:
    (machine / "sys/class/net/ib0").mkdir()
    (machine / "sys/class/net/ib0/operstate").write_text("up\n")
    assert told(machine)[0] == "TCP over ib0"


def test_nothing_at_all_is_no_crash(tmp_path: Path) -> None:
    assert told(tmp_path)[0] == "TCP over an unknown interface"


def test_this_machine_can_be_asked() -> None:
    assert find_transport({}).text and isinstance(locks_memory(), bool)
    assert can_load("libc.so.6") and not can_load("libno-such-library.so.1")


def test_each_machine_says_it_once_with_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transport.socket, "gethostname", lambda: "node-2")
    monkeypatch.setattr(transport, "find_transport", lambda environment: Transport("TCP", "no RDMA: why."))
    transport.warn_of_slow_network()
    assert capsys.readouterr().err == "warning: node-2: no RDMA: why.\n"
    monkeypatch.setattr(transport, "find_transport", lambda environment: Transport("RDMA"))
    transport.warn_of_slow_network()
    assert capsys.readouterr().err == ""
