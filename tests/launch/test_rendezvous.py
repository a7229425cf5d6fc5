"""The meeting of machines: a port in use must be reported at once, and must not block a cluster for hours."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch.distributed import PrefixStore, TCPStore

from launch.rendezvous import Leaving, rendezvous
from launch.topology import Topology
from modernbert_train.distributed.group import STORE_PREFIX
from modernbert_train.distributed.heartbeat import Beat
from modernbert_train.distributed.store_probe import wait_for_store, who_listens
from modernbert_train.errors import ConfigError
from tests.support import forked
from tests.support.jobs import RUN, SHORT, environment
from tests.support.tiny_run import TinyRun
from tests.support.waiting import free_port

pytestmark = pytest.mark.runs

HERE = "127.0.0.1"


@contextmanager
def listener(answer: bytes = b"") -> Iterator[int]:
    """Listen on a port that is not a store: answer something else, or nothing."""
    with socket.create_server((HERE, 0)) as server:
        kept = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                kept.append(connection)
                if answer:
                    connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


def test_a_store_is_distinguished_from_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's client waits for ever for a silent listener."""
    monkeypatch.setattr("modernbert_train.distributed.store_probe.ANSWER_SECONDS", 0.5)
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    assert who_listens(HERE, store.port) == "store"
    with listener() as port:
        assert who_listens(HERE, port) == "other"
        with pytest.raises(TimeoutError, match=f"{HERE}:{port}: something else has the port for 0.1 s"):
            wait_for_store(HERE, port, 0.1, tell=lambda line: None)
    with listener(b"HTTP/1.1 400 Bad Request") as port:
        assert who_listens(HERE, port) == "other"
    assert who_listens(HERE, free_port()) == "nothing"


@pytest.mark.parametrize("node_rank", [0, None])
def test_a_taken_port_is_reported_at_once_where_the_store_would_be(
    node_rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modernbert_train.distributed.store_probe.ANSWER_SECONDS", 0.5)
    with (
        listener() as port,
        pytest.raises(ConfigError, match=f"port {port} is taken on this machine, .*Give another"),
        rendezvous(Topology(2, 1, node_rank, f"{HERE}:{port}"), "run", 600.0),
    ):
        pass
    other = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    other.set("modernbert-train/run", "modernbert-train-elsewhere")
    with (
        pytest.raises(ConfigError, match=f"port {other.port} is taken .* by the run elsewhere"),
        rendezvous(Topology(2, 1, node_rank, f"{HERE}:{other.port}"), "run", 600.0),
    ):
        pass


def test_the_store_of_another_run_is_waited_for_no_longer_than_stated(capsys: pytest.CaptureFixture[str]) -> None:
    """Joining it would mix two runs; waiting for its end could take days."""
    other = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    other.set("modernbert-train/run", "modernbert-train-elsewhere")
    with (
        pytest.raises(TimeoutError, match="is where the run elsewhere meets, not this one"),
        rendezvous(Topology(2, 1, 1, f"{HERE}:{other.port}"), "run", 1.0),
    ):
        pass
    assert f"waiting for {HERE}:{other.port}: it is where the run elsewhere meets" in capsys.readouterr().out


def test_the_holder_of_the_store_leaves_last() -> None:
    """Otherwise the others lose the store after a successful run, and end their logs with frames of C++."""
    port, events = free_port(), []

    def other_machine() -> None:
        with rendezvous(Topology(2, 1, 1, f"{HERE}:{port}"), "run", 60.0):
            time.sleep(1.0)
            events.append("the other")

    thread = threading.Thread(target=other_machine)
    with rendezvous(Topology(2, 1, 0, f"{HERE}:{port}"), "run", 60.0) as meeting:
        assert meeting.place["rdzv_endpoint"] == f"{HERE}:{port}"
        thread.start()
        while who_listens(HERE, port) != "store":
            pass
    events.append("the holder")
    thread.join()
    assert events == ["the other", "the holder"]


def test_after_a_finished_run_the_store_is_kept_while_ranks_elsewhere_live(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They may still copy a checkpoint; torch's agent silently waits for them for 300 s, even if they are frozen."""
    monkeypatch.setattr("launch.rendezvous.FINISHED_SECONDS", 1.0)
    monkeypatch.setattr("launch.rendezvous.TELL_SECONDS", 0.1)
    place = Topology(2, 1, 0, f"{HERE}:{free_port()}")

    def live(store: PrefixStore) -> None:
        for number in range(10):
            beat = Beat(number, 0, "", "elsewhere", None, 1, False, None)
            store.set("modernbert-train/beat/1", json.dumps(beat))
            time.sleep(0.2)

    with rendezvous(place, "run", 60.0, Leaving(finished=True)) as meeting:
        other = PrefixStore(STORE_PREFIX, meeting.store.clone())  # type: ignore[attr-defined]
        thread = threading.Thread(target=live, args=(other,))
        thread.start()
        begun = time.monotonic()
    assert 2.0 < time.monotonic() - begun < 30.0
    thread.join()
    output, errors = capsys.readouterr()
    assert output.count("this machine's ranks have finished; waiting for the other machines, up to 1 s after") == 1
    assert "warning: no launcher's farewell from elsewhere for 1 s" in errors
    monkeypatch.setattr("launch.rendezvous.FINISHED_SECONDS", 60.0)
    with rendezvous(place, "run", 60.0, Leaving(finished=True, hurried=True)):
        begun = time.monotonic()
    assert time.monotonic() - begun < 30.0, "a signal requests not to wait"


@pytest.mark.weekly
@pytest.mark.slow
def test_two_machines_end_without_a_word_when_all_is_well(tiny_run: TinyRun) -> None:
    words = [*RUN, *tiny_run(*SHORT), "--ranks", "1", "--nodes", "2", f"--rendezvous={HERE}:{free_port()}"]
    machines = [
        forked.Popen([*words, "--node-rank", node], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for node in ("0", "1")
    ]
    for machine in machines:
        _, errors = machine.communicate(timeout=280)
        assert machine.returncode == 0, errors
        assert "frame #" not in errors and "c10d" not in errors, errors
