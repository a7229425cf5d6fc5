"""A switch in user space that loses packets: the kernels of containers often have no netem and no iptables."""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import threading

_TUNSETIFF, _TUN, _NO_HEADER = 0x400454CA, 0x0001, 0x1000  # of linux/if_tun.h
_TCP = 6


class Hub:
    """Network devices for hosts, one each, and a thread that forwards IPv4 packets between them.

    Attributes:
        loss: share of the packets that are lost.
        port: if given, TCP packets from and to other ports are lost.
    """

    def __init__(self) -> None:
        self.loss, self.port = 0.0, 0
        self._devices: dict[bytes, int] = {}  # address of the host -> device
        self._random = random.Random(1)
        self._end, self._ends = os.pipe()
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def device(self, name: str, address: str) -> None:
        """Create a device in this process's network namespace; the hub keeps it when it is moved to another."""
        handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(handle, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TUN | _NO_HEADER))
        self._devices[bytes(map(int, address.split(".")))] = handle

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        os.close(self._ends)
        if self._thread.ident is not None:
            self._thread.join()
        for handle in (self._end, *self._devices.values()):
            os.close(handle)

    def _carry(self) -> None:
        handles = [self._end, *self._devices.values()]
        while self._end not in (ready := select.select(handles, [], [])[0]):
            for handle in ready:
                try:
                    packet = os.read(handle, 65536)
                    to = self._devices.get(packet[16:20])
                    if to is not None and not self._is_lost(packet):
                        os.write(to, packet)
                except OSError:  # a host is being removed, or its queue is full
                    continue

    def _is_lost(self, packet: bytes) -> bool:
        if self.port and packet[9] == _TCP:
            start = 4 * (packet[0] & 15)
            return self.port not in struct.unpack("!HH", packet[start : start + 4])
        return self._random.random() < self.loss
