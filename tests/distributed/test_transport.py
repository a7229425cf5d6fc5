"""NCCL's network between machines, predicted from file trees like those on real machines.

If this breaks, a job on many machines trains for days over TCP at a tenth of its speed, without a warning.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


INFINIBAND, ONE = f"(InfiniBand, {NDR})", {"mlx5_0": {}}
THREE = {"mlx5_0": {}, "mlx5_1": {}, "mlx5_10": {}}
RING = {"mlx5_0": {}, "mlx5_1": {"link": "Ethernet", "rate": "100 Gb/sec (4X EDR)"}}
HIDDEN = "mlx5_0 lacks a file in /dev/infiniband that this user may open"
ABSENT, REQUIRED = "no device in /sys/class/infiniband", "NCCL_NET=IB then ends with an error"
LOCKED, OFF = f"RDMA over mlx5_0 {INFINIBAND}: locked memory is limited, see `ulimit -l`", {"NCCL_IB_DISABLE": "1"}
UNLOADED = "libibverbs.so.1 cannot be loaded (packages libibverbs1 and ibverbs-providers)"


def rdma(*names: str) -> str:
    return "RDMA over " + ", ".join(f"{name} {INFINIBAND}" for name in names)


def fallback(reason: str, end: str = "NCCL will use TCP over eth0, which is slow") -> str:
    return f"no RDMA between machines: {reason}; {end}. docs/clusters.md"


@pytest.mark.parametrize(
    ("devices", "environment", "text", "warning"),
    [
        pytest.param(RING, {}, f"{rdma('mlx5_0')}, mlx5_1 (RoCE, 100 Gb/sec (4X EDR))", "", id="InfiniBand and RoCE"),
        pytest.param({"mlx5_0": {"state": "1: DOWN"}, "mlx5_1": {}}, {}, rdma("mlx5_1"), "", id="one of two is usable"),
        # a fall back to TCP is a warning with its reason
        ({}, {}, "TCP over eth0", fallback(ABSENT)),
        ({"mlx5_0": {"state": "1: DOWN"}}, {}, "TCP over eth0", fallback("no port of mlx5_0 is active")),
        ({"mlx5_0": {"state": "2: INIT"}}, {}, "TCP over eth0", fallback("no port of mlx5_0 is active")),
        ({"mlx5_0": {"file": False}}, {}, "TCP over eth0", fallback(HIDDEN)),
        pytest.param(ONE, {"loads": ""}, "TCP over eth0", fallback(UNLOADED), id="an image without the library"),
        # the choice of devices is respected
        (THREE, {"NCCL_IB_HCA": "mlx5_1"}, rdma("mlx5_1", "mlx5_10"), ""),
        (THREE, {"NCCL_IB_HCA": "=mlx5_1"}, rdma("mlx5_1"), ""),
        (THREE, {"NCCL_IB_HCA": "=mlx5_1:1"}, rdma("mlx5_1"), ""),
        (THREE, {"NCCL_IB_HCA": "^mlx5_1"}, rdma("mlx5_0"), ""),
        (THREE, {"NCCL_IB_HCA": "^=mlx5_1"}, rdma("mlx5_0", "mlx5_10"), ""),
        (THREE, {"NCCL_IB_HCA": "mlx5_0,mlx5_10"}, rdma("mlx5_0", "mlx5_10"), ""),
        (ONE, {"NCCL_IB_HCA": "efa"}, "TCP over eth0", fallback("NCCL_IB_HCA=efa leaves none of mlx5_0")),
        # a requested setting is no warning
        (ONE, OFF, "TCP over eth0 (NCCL_IB_DISABLE=1)", ""),
        (ONE, {"NCCL_NET": "Socket"}, "TCP over eth0 (NCCL_NET=Socket)", ""),
        (ONE, {"NCCL_NET": "AWS Libfabric"}, "AWS Libfabric (NCCL_NET)", ""),
        (ONE, {"NCCL_NET_PLUGIN": "gib"}, "network plugin gib", ""),
        (ONE, OFF | {"NCCL_SOCKET_IFNAME": "e"}, "TCP over NCCL_SOCKET_IFNAME=e (NCCL_IB_DISABLE=1)", ""),
        # a plugin that lies in the way of the linker is used
        ({}, {"loads": PLUGIN}, f"network plugin {PLUGIN}", ""),
        ({}, {"loads": PLUGIN, "NCCL_NET_PLUGIN": "none"}, "TCP over eth0", "no RDMA"),
        pytest.param({}, {"NCCL_NET": "IB"}, "TCP over eth0", fallback(ABSENT, REQUIRED), id="RDMA is required"),
        pytest.param(ONE, {"locks": False}, rdma("mlx5_0"), LOCKED, id="memory cannot be registered"),
    ],
)
def test_nccls_network_is_predicted_with_a_warning_where_it_is_slow(
    machine: Path, devices: dict[str, Any], environment: dict[str, Any], text: str, warning: str
) -> None:
    for name, settings in devices.items():
        add_device(machine, name, **settings)
    found = told(machine, **environment)
    assert found[0] == text and found[1].startswith(warning) and bool(found[1]) == bool(warning)


def told(root: Path, *, loads: str = VERBS, locks: bool = True, **environment: str) -> tuple[str, str]:
    """Return text and warning where one library can be loaded."""
    found = find_transport(environment, root, lambda library: library == loads, lambda: locks)
    return found.text, found.warning or ""


def test_ip_over_infiniband_is_what_nccl_takes_first(machine: Path) -> None:
    (machine / "sys/class/net/ib0").mkdir()
    (machine / "sys/class/net/ib0/operstate").write_text("up\n")
    assert told(machine)[0] == "TCP over ib0"
    assert told(machine / "empty")[0] == "TCP over an unknown interface"


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
