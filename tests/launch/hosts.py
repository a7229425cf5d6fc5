"""Two hosts on one machine: network namespaces with a cable between them, each with a name of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


class Host:
    """One of the two.

    Attributes:
        name: what `hostname` says on it.
        address: its address on the cable.
    """

    def __init__(self, name: str, address: str, namespace: str) -> None:
        self.name, self.address, self.namespace = name, address, namespace

    def start(self, command: list[str], output: IO[str], **environment: str) -> subprocess.Popen[str]:
        """Start a process on this host; the Popen's id is that of the command itself."""
        inside = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name, *command]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *inside],
            env=os.environ | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def cut(self) -> None:
        """Pull the cable: nothing is refused or closed, it only never arrives."""
        _ip("-n", self.namespace, "link", "set", "cable", "down")


def missing() -> str | None:
    """Why there can be no such hosts here, or None."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "no `ip` or `unshare` here"
    name = f"mt-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode != 0:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    probe = subprocess.run(["ip", "netns", "exec", name, "unshare", "--uts", "true"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], check=False)
    return None if probe.returncode == 0 else f"namespaces cannot be entered here: {probe.stderr.strip()}"


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make them, and take them away afterwards with every process that is left on them."""
    names = [f"mt-{os.getpid()}-{letter}" for letter in "ab"]
    hosts = [Host(f"host-{letter}", f"10.77.0.{i}", names[i - 1]) for i, letter in enumerate("ab", start=1)]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for host in hosts:
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "cable")
            _ip("-n", host.namespace, "link", "set", "cable", "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        yield hosts[0], hosts[1]
    finally:
        for name in names:
            left = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
            for pid in left:
                if Path(f"/proc/{pid}").exists():
                    subprocess.run(["kill", "-KILL", pid], check=False)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
