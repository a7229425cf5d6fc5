"""Several hosts on one machine: network namespaces, each with a host name and some separate files."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tests.launch.hub import Hub
from tests.support import forked

ON_HOST = str(Path(__file__).with_name("on_host.py"))


class Host:
    """A host.

    Attributes:
        name: its `hostname`.
        address: its address for the others.
    """

    def __init__(self, name: str, address: str, namespace: str, folder: Path) -> None:
        self.name, self.address, self.namespace = name, address, namespace
        self._folder = folder / name
        self._folder.mkdir()
        (self._folder / "boot_id").write_text(f"{uuid.uuid4()}\n")

    def start(self, command: list[str], output: IO[str], **environment: str) -> forked.Popen:
        """Start `python SCRIPT ...` on this host; the Popen's id is the script's process id."""
        return forked.Popen(
            [command[0], ON_HOST, self.namespace, self.name, str(self._folder), *command[1:]],
            env=os.environ | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def cut(self) -> None:
        """Pull the cable: packets are lost, and no connection is refused or closed."""
        _ip("-n", self.namespace, "link", "set", "cable", "down")

    def lose_packets_to(self, other: Host) -> None:
        """Route packets for another host to a machine that does not exist; the way back still works."""
        wrong = ("lladdr", "02:00:00:00:00:99", "dev", "cable", "nud", "permanent")
        _ip("-n", self.namespace, "neigh", "replace", other.address, *wrong)

    def write_etc_hosts(self, addresses: dict[str, str]) -> None:
        """Map names to addresses for processes that are started on this host from now on."""
        lines = [f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **addresses}.items()]
        (self._folder / "hosts").write_text("".join(lines))


def missing() -> str | None:
    """Return the reason why such hosts are impossible here, or None."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "no `ip` or `unshare` here"
    name = f"mt-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode != 0:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    inside = ["unshare", "--uts", "--mount", "mount", "--bind", "/dev/null", "/etc/hosts"]
    probe = subprocess.run(["ip", "netns", "exec", name, *inside], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], check=False)
    return None if probe.returncode == 0 else f"namespaces cannot be entered here: {probe.stderr.strip()}"


@contextmanager
def hosts_with_a_switch(count: int = 2, network: str = "10.77.0") -> Iterator[list[Host]]:
    """Create hosts connected to a switch, a bridge in a namespace; afterwards remove them and kill their processes."""
    switch = f"mt-{os.getpid()}-switch"
    _ip("netns", "add", switch)
    try:
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        with _hosts(count, network) as hosts:
            for number, host in enumerate(hosts):
                plug, end = ("name", f"plug{number}"), ("netns", host.namespace)
                _ip("link", "add", "cable", *end, "type", "veth", "peer", *plug, "netns", switch)
                _ip("-n", switch, "link", "set", plug[1], "master", "switch", "up")
            _come_up(hosts)
            yield hosts
    finally:
        subprocess.run(["ip", "netns", "del", switch], check=False, capture_output=True)


@contextmanager
def hosts_with_a_hub() -> Iterator[tuple[Hub, list[Host]]]:
    """Create two hosts connected by a hub, which can lose packets."""
    hub = Hub()
    try:
        with _hosts(2, "10.77.0") as hosts:
            for host in hosts:
                device = f"mt{host.name[-1]}{os.getpid()}"  # briefly among this machine's devices
                hub.device(device, host.address)
                _ip("link", "set", device, "netns", host.namespace)
                _ip("-n", host.namespace, "link", "set", device, "name", "cable")
            _come_up(hosts)
            hub.start()
            yield hub, hosts
    finally:
        hub.close()


@contextmanager
def _hosts(count: int, network: str) -> Iterator[list[Host]]:
    """Create namespaces without any connection, and remove them afterwards."""
    letters = "abc"[:count]
    names = [f"mt-{os.getpid()}-{letter}" for letter in letters]
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in names:
                _ip("netns", "add", name)
            yield [
                Host(f"host-{letter}", f"{network}.{number}", name, Path(folder))
                for number, (letter, name) in enumerate(zip(letters, names, strict=True), start=1)
            ]
        finally:
            for name in names:
                left = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
                for pid in left:
                    if Path(f"/proc/{pid}").exists():
                        subprocess.run(["kill", "-KILL", pid], check=False)
                subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _come_up(hosts: list[Host]) -> None:
    for host in hosts:
        _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "cable")
        _ip("-n", host.namespace, "link", "set", "cable", "up")
        _ip("-n", host.namespace, "link", "set", "lo", "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
