"""Find out whether torch's rendezvous store listens at an address, before torch's client waits there without a timeout.

torch's client sends its greeting and waits for an answer, even from a port of another program. So the greeting is sent
here first, with a timeout. This is the start of torch's own protocol: a validation number, then a ping that the store
returns (torch/csrc/distributed/c10d/TCPStoreBackend.hpp).
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

ANSWER_SECONDS = 5.0  # a store answers a ping within milliseconds
LOOK_SECONDS = 0.5

_VALIDATE, _PING, _MAGIC = 0, 13, 0x3C85F7CE

Found = Literal["nothing", "store", "other"]


def who_listens(host: str, port: int) -> Found:
    """Return whether nothing, a store, or some other server listens at an address."""
    nonce = struct.pack("=I", os.getpid())
    listener: Found = "nothing"
    with suppress(OSError), socket.create_connection((host, port), timeout=ANSWER_SECONDS) as connection:
        listener = "other"
        connection.sendall(struct.pack("=BI", _VALIDATE, _MAGIC) + struct.pack("=B", _PING) + nonce)
        with connection.makefile("rb") as answers:
            if answers.read(len(nonce)) == nonce:
                listener = "store"
    return listener


def wait_for_store(host: str, port: int, seconds: float, tell: Callable[[str], None]) -> None:
    """Wait until a store listens at an address.

    Args:
        host, port: the address.
        seconds: longest wait, even if another server listens there.
        tell: called with a line when the wait starts and when its reason changes.

    Raises:
        TimeoutError: no store appeared; the message names what listens there instead.
    """
    deadline = time.monotonic() + seconds
    reported = None
    while (listener := who_listens(host, port)) != "store":
        problem = "something else has the port" if listener == "other" else "nothing answers"
        if time.monotonic() > deadline:
            raise TimeoutError(f"{host}:{port}: {problem} for {round(seconds, 1):g} s")
        if reported != listener:
            tell(f"waiting for {host}:{port}: {problem}")
            reported = listener
        time.sleep(LOOK_SECONDS)
