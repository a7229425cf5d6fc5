"""Rendezvous of several machines: one holds a store for all, from before the first arrives until the last has left.

torch's agent makes such a store too, and closes it as soon as its own ranks have ended, so the other machines lose it.
This module opens one first, at the same address and in the same process; torch uses it, and it stays open.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # its types forget them

from launch.network import interface_of, is_here, is_loopback, local_address, peer_address
from launch.topology import Topology
from modernbert_train.config.launch import split_endpoint
from modernbert_train.core.text import first_line
from modernbert_train.distributed.group import STORE_PREFIX
from modernbert_train.distributed.heartbeat import last_beats
from modernbert_train.distributed.store_probe import wait_for_store, who_listens
from modernbert_train.errors import ConfigError

LINGER_SECONDS = 10.0  # after an error the store stays open this long, so that the other machines can read it
FINISHED_SECONDS = 60.0  # after a finished run it stays open this long after the other machines' last heartbeat
TELL_SECONDS = 10.0  # a longer wait is announced
_RUN, _LEFT = "modernbert-train/run", "modernbert-train/left"
_KNOWN_AS = "modernbert-train/known-as"  # the address at which others have reached the store's machine
_LOCAL = "127.0.0.1"
_WAIT_SECONDS = 30.0  # maximum wait for an answer of the store


class Meeting(NamedTuple):
    """The meeting of the machines: settings for torch's agent, and a connection to the store.

    Attributes:
        interface: network interface towards the others; None for a single machine, or if not found.
    """

    place: Mapping[str, object]
    store: TCPStore
    holds_store: bool
    interface: str | None = None


@dataclass
class Leaving:
    """How this machine leaves the others.

    Attributes:
        finished: its ranks have finished; the others' ranks may still be writing.
        hurried: a signal requests not to wait for the others.
    """

    finished: bool = False
    hurried: bool = False


@contextmanager
def rendezvous(topology: Topology, run_id: str, seconds: float, leaving: Leaving | None = None) -> Iterator[Meeting]:
    """Meet the other machines; a machine that is alone holds the store too.

    Args:
        topology: this machine among the others.
        run_id: the same on all machines of one run.
        seconds: to wait for the others, also if another program listens at their address.
        leaving: read at the end.

    Raises:
        ConfigError: the port is taken on this machine, which should hold the store.
        TimeoutError: the store's machine does not answer, or another program does.
    """
    endpoint = split_endpoint(topology.endpoint or "")
    if endpoint is None:
        store = TCPStore(_LOCAL, 0, is_master=True, multi_tenant=True, wait_for_workers=False)
        here = {"rdzv_endpoint": f"{_LOCAL}:{store.port}", "local_addr": _LOCAL, "rdzv_configs": {"is_host": True}}
        yield Meeting(here, store, True)
        return
    deadline = time.monotonic() + seconds
    address = _address(endpoint, deadline)
    held = _hold(topology, endpoint, run_id)
    is_host = held is not None
    store = held if held is not None else _come(endpoint, run_id, deadline)
    if is_host:
        address = _known_as(store, endpoint, address, deadline)
    else:
        store.set(_KNOWN_AS, peer_address(*endpoint))
    join_timeout = max(1, int(deadline - time.monotonic()))
    variables = {
        "rdzv_endpoint": topology.endpoint,
        "local_addr": address,
        "rdzv_configs": {"join_timeout": join_timeout, "is_host": is_host},
    }
    try:
        yield Meeting(variables, store, is_host, interface_of(address))
    finally:
        _leave(store, topology, is_host, leaving or Leaving())


def _address(endpoint: tuple[str, int], deadline: float) -> str:
    """Return this machine's address towards the others; the name of a starting machine may resolve late."""
    while time.monotonic() < deadline:
        with suppress(TimeoutError):
            return local_address(*endpoint)
        time.sleep(0.5)
    return local_address(*endpoint)


def _known_as(store: TCPStore, endpoint: tuple[str, int], address: str, deadline: float) -> str:
    """Return the address by which the others know this machine, which holds the store.

    Its own name may resolve to a loopback address: Debian and Ubuntu write 127.0.1.1 into /etc/hosts. Then the address
    used by another machine counts, and this one waits for the first to arrive.

    Raises:
        TimeoutError: none arrives, or this machine does not have the address that it used.
    """
    host = endpoint[0]
    if not is_loopback(address) or host in (
        "localhost",
        peer_address(*endpoint),
    ):  # loopback on purpose: all launchers on one machine
        return address
    while not store.check([_KNOWN_AS]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no other machine came; {host} is {peer_address(*endpoint)} on this one")
        time.sleep(0.1)
    name = store.get(_KNOWN_AS).decode()
    if not is_here(name):
        raise TimeoutError(
            f"{host} is {peer_address(*endpoint)} on this machine and {name} on another, which this one does not "
            "have; see /etc/hosts, or give --rendezvous an address"
        )
    return name


def _hold(topology: Topology, endpoint: tuple[str, int], run_id: str) -> TCPStore | None:
    """Open the store if this machine should hold it, else return None."""
    host, port = endpoint
    if topology.node_rank not in (0, None) or (topology.node_rank is None and not is_here(host)):
        return None
    try:
        store = TCPStore(
            host, port, is_master=True, multi_tenant=True, wait_for_workers=False,
            timeout=timedelta(seconds=_WAIT_SECONDS),
        )  # fmt: skip
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error):
            raise TimeoutError(f"{host}:{port}: {first_line(error)}") from error
        owner = _owner(endpoint)
        if topology.node_rank is None and owner == run_id:
            return None  # two launchers run on this machine, and the other one was first
        owned = f" by the run {owner.removeprefix('modernbert-train-')}" if owner else ""
        raise ConfigError(
            f"--rendezvous {topology.endpoint}: port {port} is taken on this machine, {socket.gethostname()}{owned}. "
            "Give another, the same to all machines, on the command line or as launch.rendezvous."
        ) from error
    store.set(_RUN, run_id)
    return store


def _owner(endpoint: tuple[str, int]) -> str | None:
    """Return the run whose store listens there; empty for another project's store, None if it is no store."""
    if who_listens(*endpoint) != "store":
        return None
    with suppress(RuntimeError):  # it has ended since
        store = TCPStore(*endpoint, is_master=False, timeout=timedelta(seconds=_WAIT_SECONDS))
        return store.get(_RUN).decode() if store.check([_RUN]) else ""
    return None


def _come(endpoint: tuple[str, int], run_id: str, deadline: float) -> TCPStore:
    """Wait for the store of this run and connect to it."""
    where = ":".join(map(str, endpoint))
    announced = False
    at, hint = peer_address(*endpoint), ""
    if is_loopback(at) and at != endpoint[0]:
        hint = f" ({endpoint[0]} is {at} on this machine, which reaches nothing but itself: see /etc/hosts)"
    while True:
        try:
            seconds_left = max(0.0, deadline - time.monotonic())
            wait_for_store(*endpoint, seconds_left, lambda line: print(line + hint, flush=True))
        except TimeoutError as error:
            raise TimeoutError(f"{error}{hint}") from None
        owner = _owner(endpoint)
        if owner == run_id:
            with suppress(RuntimeError):  # it has ended since
                return TCPStore(*endpoint, is_master=False, timeout=timedelta(seconds=_WAIT_SECONDS))
        elif owner is not None:
            what = f"the run {owner.removeprefix('modernbert-train-')}" if owner else "another program"
            if time.monotonic() > deadline:
                raise TimeoutError(f"{where} is where {what} meets, not this one")
            if not announced:
                print(f"waiting for {where}: it is where {what} meets, not this one", flush=True)
                announced = True
        time.sleep(0.5)


def _leave(store: TCPStore, topology: Topology, is_host: bool, leaving: Leaving) -> None:
    """Note in the store that this machine has left; the store's machine waits for the others, with a limit."""
    if not is_host:
        # not for ever: the machine that holds the store may be frozen
        noting = threading.Thread(target=_note_left, args=(store,), daemon=True)
        noting.start()
        noting.join(LINGER_SECONDS)
        if noting.is_alive() and leaving.finished:
            warn_unanswered(topology)
        return
    with suppress(RuntimeError):  # the store is lost, and its error is reported elsewhere
        _note_left(store)
        _wait_for_others(store, topology, leaving)


def _note_left(store: TCPStore) -> None:
    with suppress(RuntimeError):  # the store is lost, and its error is reported elsewhere
        store.set(f"{_LEFT}/{socket.gethostname()}", "")
        store.add(_LEFT, 1)


def warn_unanswered(topology: Topology) -> None:
    """Warn that the store's machine does not answer, after this machine's ranks have finished."""
    print(
        f"warning: this machine's ranks have finished, and {topology.endpoint}, where the machines meet, does not "
        "answer: its launcher is frozen or cut off. This one ends without it.",
        file=sys.stderr,
        flush=True,
    )


def _wait_for_others(store: TCPStore, topology: Topology, leaving: Leaving) -> None:
    """Keep the store open until the others have left; after a finished run also while their ranks send heartbeats."""
    begun = alive = time.monotonic()
    ranks, beats, announced = PrefixStore(STORE_PREFIX, store), None, False
    while store.add(_LEFT, 0) < topology.nodes and not leaving.hurried:
        now = time.monotonic()
        if leaving.finished and (newest := last_beats(ranks, topology.num_ranks)) != beats:
            beats, alive = newest, now
        if now - alive > (FINISHED_SECONDS if leaving.finished else LINGER_SECONDS):
            break
        if leaving.finished and not announced and now - begun > TELL_SECONDS:
            announced = True
            print(
                "launch: this machine's ranks have finished; waiting for the other machines, up to "
                f"{FINISHED_SECONDS:g} s after the last sign of life of their ranks",
                flush=True,
            )
        time.sleep(0.1)
    else:
        return
    if leaving.finished:
        hosts = sorted({beat.host for beat in beats or [] if beat} - {socket.gethostname()})
        late = [host for host in hosts if not store.check([f"{_LEFT}/{host}"])]
        print(
            f"warning: no launcher's farewell from {', '.join(late) or 'another machine'} for {FINISHED_SECONDS:g} s: "
            "it is frozen, gone or cut off. The ranks of this machine have finished, and it ends.",
            file=sys.stderr,
            flush=True,
        )
