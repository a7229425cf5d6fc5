"""Meeting of several machines: one holds a store for all, from before the first comes until the last has left.

torch's agent makes such a store too, and drops it as soon as its own ranks have ended; the other machines then look
for it in vain. The one that is made here, at the same address and in the same process, is the same to torch and stays.
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

from launch.network import interface_of, is_here, is_loopback, local_address, reached_at
from launch.topology import Topology
from modernbert_train.config.launch import split_endpoint
from modernbert_train.core.text import first_line
from modernbert_train.distributed.group import STORE_PREFIX
from modernbert_train.distributed.heartbeat import last_beats
from modernbert_train.distributed.rendezvous import wait_for_store, who_listens
from modernbert_train.errors import ConfigError

LINGER_SECONDS = 10.0  # what the store holds is how the others hear of an error; then whoever holds it ends too
FINISHED_SECONDS = 60.0  # after a finished run: from the last sign of life of the other machines' ranks on
TELL_SECONDS = 10.0  # a wait that is longer is announced
_RUN, _LEFT = "modernbert-train/run", "modernbert-train/left"
_KNOWN_AS = "modernbert-train/known-as"  # the address by which others have reached the machine that holds the store
_LOCAL = "127.0.0.1"
_WAIT_SECONDS = 30.0  # for an answer of the store


class Meeting(NamedTuple):
    """Where the machines meet: what torch's agent needs to know of it, and a connection to the store.

    Attributes:
        interface: of the network on which this machine reaches the others; None where it is alone, or not found.
    """

    place: Mapping[str, object]
    store: TCPStore
    holds_store: bool
    interface: str | None = None


@dataclass
class Leaving:
    """How this machine leaves the others.

    Attributes:
        finished: its ranks have ended in order, and those of the others may still have something to write.
        hurried: a signal asks not to wait for the others.
    """

    finished: bool = False
    hurried: bool = False


@contextmanager
def rendezvous(topology: Topology, run_id: str, seconds: float, leaving: Leaving | None = None) -> Iterator[Meeting]:
    """Meet the other machines; a machine that is alone holds the store too.

    Args:
        topology: where this machine stands among the others.
        run_id: the same on all machines of one run.
        seconds: to wait for the others, whatever listens in their place.
        leaving: read at the end.

    Raises:
        ConfigError: the port is taken on this machine, which was to hold the store.
        TimeoutError: the others' machine does not answer, or something else does.
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
    address = _known_as(store, endpoint, address, deadline) if is_host else _tell_host(store, endpoint, address)
    join_timeout = max(1, int(deadline - time.monotonic()))
    place = {
        "rdzv_endpoint": topology.endpoint,
        "local_addr": address,
        "rdzv_configs": {"join_timeout": join_timeout, "is_host": is_host},
    }
    try:
        yield Meeting(place, store, is_host, interface_of(address))
    finally:
        _leave(store, topology, is_host, leaving or Leaving())


def _address(endpoint: tuple[str, int], deadline: float) -> str:
    """This machine's address on its way to the others; the name of a machine that is starting may come late."""
    while time.monotonic() < deadline:
        with suppress(TimeoutError):
            return local_address(*endpoint)
        time.sleep(0.5)
    return local_address(*endpoint)


def _tell_host(store: TCPStore, endpoint: tuple[str, int], address: str) -> str:
    """Tell the machine that holds the store by which address it is reached; return this machine's own."""
    store.set(_KNOWN_AS, reached_at(*endpoint))
    return address


def _known_as(store: TCPStore, endpoint: tuple[str, int], address: str, deadline: float) -> str:
    """Return the address by which the others know this machine, which holds the store.

    Its own name may stand for a loopback address here: Debian and Ubuntu write 127.0.1.1 into /etc/hosts. Then what
    another machine has used counts, and this one waits for the first to come.

    Raises:
        TimeoutError: none comes, or its address for this machine is not one of this machine's.
    """
    host = endpoint[0]
    if not is_loopback(address) or host in (
        "localhost",
        reached_at(*endpoint),
    ):  # given so, for launchers of one machine
        return address
    while not store.check([_KNOWN_AS]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no other machine came; {host} is {reached_at(*endpoint)} on this one")
        time.sleep(0.1)
    found = store.get(_KNOWN_AS).decode()
    if not is_here(found):
        raise TimeoutError(
            f"{host} is {reached_at(*endpoint)} on this machine and {found} on another, which this one does not have; "
            "see /etc/hosts, or give --rendezvous an address"
        )
    return found


def _hold(topology: Topology, endpoint: tuple[str, int], run_id: str) -> TCPStore | None:
    """The store, if it is for this machine to hold it."""
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
            return None  # two of the machines are this one, and the other launcher came first
        owned = f" by the run {owner.removeprefix('modernbert-train-')}" if owner else ""
        raise ConfigError(
            f"--rendezvous {topology.endpoint}: port {port} is taken on this machine, {socket.gethostname()}{owned}. "
            "Give another, the same to all machines, on the command line or as launch.rendezvous."
        ) from error
    store.set(_RUN, run_id)
    return store


def _owner(endpoint: tuple[str, int]) -> str | None:
    """The run whose store listens there; empty if it is not of this project, None if it is no store."""
    if who_listens(*endpoint) != "store":
        return None
    with suppress(RuntimeError):  # it has ended since
        store = TCPStore(*endpoint, is_master=False, timeout=timedelta(seconds=_WAIT_SECONDS))
        return store.get(_RUN).decode() if store.check([_RUN]) else ""
    return None


def _come(endpoint: tuple[str, int], run_id: str, deadline: float) -> TCPStore:
    """A connection to the store of this run."""
    where = ":".join(map(str, endpoint))
    told = False
    at, hint = reached_at(*endpoint), ""
    if is_loopback(at) and at != endpoint[0]:
        hint = f" ({endpoint[0]} is {at} on this machine, which reaches nothing but itself: see /etc/hosts)"
    while True:
        try:
            left = max(0.0, deadline - time.monotonic())
            wait_for_store(*endpoint, left, lambda line: print(line + hint, flush=True))
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
            if not told:
                print(f"waiting for {where}: it is where {what} meets, not this one", flush=True)
                told = True
        time.sleep(0.5)


def _leave(store: TCPStore, topology: Topology, is_host: bool, leaving: Leaving) -> None:
    """Note that this machine needs the store no more; the one that holds it waits for the others, with a limit."""
    if not is_host:
        # not for ever: the machine that holds the store may be frozen
        noting = threading.Thread(target=_note_left, args=(store,), daemon=True)
        noting.start()
        noting.join(LINGER_SECONDS)
        if noting.is_alive() and leaving.finished:
            tell_unanswered(topology)
        return
    with suppress(RuntimeError):  # the store is lost, and what led to that is being told
        _note_left(store)
        _wait_for_others(store, topology, leaving)


def _note_left(store: TCPStore) -> None:
    with suppress(RuntimeError):  # the store is lost, and what led to that is being told
        store.set(f"{_LEFT}/{socket.gethostname()}", "")
        store.add(_LEFT, 1)


def tell_unanswered(topology: Topology) -> None:
    """Warn that the machine which holds the store does not answer, after this machine's ranks have finished."""
    print(
        f"warning: this machine's ranks have finished, and {topology.endpoint}, where the machines meet, does not "
        "answer: its launcher is frozen or cut off. This one ends without it.",
        file=sys.stderr,
        flush=True,
    )


def _wait_for_others(store: TCPStore, topology: Topology, leaving: Leaving) -> None:
    """Keep the store until the others have left; after a finished run also while their ranks give signs of life."""
    begun = alive = time.monotonic()
    ranks, beats, told = PrefixStore(STORE_PREFIX, store), None, False
    while store.add(_LEFT, 0) < topology.nodes and not leaving.hurried:
        now = time.monotonic()
        if leaving.finished and (found := last_beats(ranks, topology.num_ranks)) != beats:
            beats, alive = found, now
        if now - alive > (FINISHED_SECONDS if leaving.finished else LINGER_SECONDS):
            break
        if leaving.finished and not told and now - begun > TELL_SECONDS:
            told = True
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
