"""Find this machine's route to another one: the addresses and network interface between them."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from contextlib import suppress

from modernbert_train.core.files import os_errors_as

_SIOCGIFADDR = 0x8915  # asks Linux for the address of a network interface


def local_address(host: str, port: int) -> str:
    """Return the address of this machine on its way to another, see `_way`."""
    return _way(host, port)[0]


def peer_address(host: str, port: int) -> str:
    """Return the address by which this machine reaches another, see `_way`."""
    return _way(host, port)[1]


def _way(host: str, port: int) -> tuple[str, str]:
    """Return the addresses of both ends of a connection to a host; no packet is sent.

    Raises:
        TimeoutError: the host cannot be resolved, or cannot be reached.
    """
    with os_errors_as(TimeoutError, host):
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0]), str(probe.getpeername()[0])


def is_loopback(address: str) -> bool:
    """Return True if an address reaches nothing but this machine itself."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_of(address: str) -> str | None:
    """Return the network interface with an IPv4 address; None if not found."""
    for _, name in socket.if_nameindex():
        # an interface without an address raises OSError
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None


def is_here(host: str) -> bool:
    """True if a name or an address belongs to this machine."""
    with suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
            return True
    return False
