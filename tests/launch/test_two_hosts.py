"""Several machines, as network namespaces of one: connected, one lost, restarted, with the same result."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launch.hosts import Host, hosts_with_a_hub, hosts_with_a_switch, missing
from tests.launch.hub import Hub
from tests.support.jobs import LONG, RUN, SHORT, alive, children, environment, losses, wait_for_steps
from tests.support.runs import launch
from tests.support.tiny_run import TinyRun
from tests.support.waiting import until

TIMEOUT = 8  # distributed.timeout_seconds
BUSY = 30  # additional seconds for a busy machine
HEARD = 1.5  # seconds until each rank knows the others and their machines
SILENT = r"error: rank 1 on host-b: 10\.77\.0\.1:\d+, where the ranks meet: no answer .* machine \(host-a, with rank 0"
HANGS = "error: rank 1 on host-b: hangs: no sign of life"
LOST = r".*error: (rank 1 on host-b: lost the machine|lost) 10\.77\.0\.1:\d+"


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with hosts_with_a_switch() as found:
        yield found


class Pair:
    """A run with one rank on each of two or more hosts; the first host is the rendezvous."""

    def __init__(self, hosts: list[Host], words: list[str], folder: Path, meets: str = "", **variables: str) -> None:
        self.logs = [folder / f"{host.name}.log" for host in hosts]
        endpoint = f"{meets or hosts[0].address}:29500"
        self.launchers = []
        for number, (host, log) in enumerate(zip(hosts, self.logs, strict=True)):
            where = f"--ranks=1 --nodes={len(hosts)} --node-rank={number} --rendezvous={endpoint}".split()
            with log.open("w") as output:
                self.launchers.append(host.start([*RUN, *words, *where], output, **environment(**variables)))

    def send(self, number: int, sent: signal.Signals) -> None:
        """Signal all processes of a run on one host: SIGKILL is a power loss, SIGSTOP a machine that freezes."""
        launcher = self.launchers[number].pid
        for pid in [launcher, *children(launcher)]:
            os.kill(pid, sent)

    def kill(self, number: int) -> None:
        self.send(number, signal.SIGKILL)
        self.launchers[number].wait()

    def succeed(self, seconds: float = 150) -> None:
        for number in range(len(self.launchers)):
            code, output = self.end(number, seconds)
            assert code == 0, output

    def end(self, number: int, seconds: float) -> tuple[int, str]:
        code = self.launchers[number].wait(seconds)
        return code, self.logs[number].read_text()


@pytest.mark.runs
def test_a_name_that_is_a_loopback_address_at_home_is_no_place_to_meet(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Debian and Ubuntu write 127.0.1.1 for a machine's own name, which other machines cannot reach."""
    if reason := missing():
        pytest.skip(reason)
    with hosts_with_a_switch(network="192.168.77") as hosts:
        for host in hosts:
            host.write_etc_hosts({each.name: each.address if each != host else "127.0.1.1" for each in hosts})
        Pair(hosts, tiny_run(*SHORT), tmp_path, meets="host-a").succeed()


@pytest.mark.weekly
@pytest.mark.slow
def test_a_first_machine_that_is_a_loopback_address_elsewhere_is_reported(
    hosts: list[Host], tiny_run: TinyRun, tmp_path: Path
) -> None:
    for host in hosts:
        host.write_etc_hosts({"host-a": "127.0.1.1"})
    pair = Pair(hosts, tiny_run(*SHORT, "launch.rendezvous_seconds=5"), tmp_path, meets="host-a")
    ends = [pair.end(number, 5 + 15 + BUSY) for number in (0, 1)]
    assert [code for code, _ in ends] == [70, 70], ends
    assert "no other machine came; host-a is 127.0.1.1 on this one" in ends[0][1]
    assert "host-a is 127.0.1.1 on this machine, which reaches nothing but itself: see /etc/hosts" in ends[1][1]


@pytest.mark.weekly
@pytest.mark.slow
def test_a_lost_host_is_named_and_the_run_resumes_as_if_never_stopped(
    hosts: list[Host], tiny_run: TinyRun, tmp_path: Path
) -> None:
    changes = ("phases.short.tokens=8000", "checkpoint.interval_steps=4", f"distributed.timeout_seconds={TIMEOUT}")
    launch(tiny_run("name=whole", *changes))
    words, folder = tiny_run("name=lost", *changes), tmp_path / "runs/lost"
    pair = Pair(hosts, words, tmp_path)
    wait_for_steps(folder, 6, pair.launchers)
    pair.kill(1)
    code, output = pair.end(0, TIMEOUT + 30 + 30)  # documented: timeout plus 30 seconds; 30 more for a busy machine
    assert code == 70, output
    assert output.splitlines()[-1].startswith("error: rank 1 on host-b: is gone")
    Pair(hosts, words, tmp_path).succeed()
    assert losses(folder) == losses(tmp_path / "runs/whole") and len(losses(folder)) > 15


def training(hosts: list[Host], tiny_run: TinyRun, folder: Path, *changes: str, **variables: str) -> Pair:
    """Return a long run in its fourth step or later, in which every rank knows the others."""
    words = tiny_run(*LONG, f"distributed.timeout_seconds={TIMEOUT}", *changes)
    pair = Pair(hosts, words, folder, **variables)
    wait_for_steps(folder / "runs/tiny", 4, pair.launchers)
    time.sleep(HEARD)
    return pair


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "seconds", "code", "last_lines"),
    [
        # nothing is closed or refused, so only the silence is noticed; each side must end by itself
        pytest.param(lambda pair, a, b: b.cut(), 15, 124, {0: HANGS, 1: SILENT}, id="a cable"),
        pytest.param(lambda pair, a, b: b.lose_packets_to(a), 15, 124, {0: HANGS, 1: SILENT}, id="one way"),
        # requests to the store block; the other must not take its own healthy rank for frozen
        pytest.param(lambda pair, *_: pair.send(0, signal.SIGSTOP), 30, 124, {1: SILENT}, id="a frozen first host"),
        # no message can be exchanged: only the address of the store can be named, by a rank or a launcher
        pytest.param(lambda pair, *_: pair.kill(0), 50, 70, {1: LOST}, id="a lost first host"),
        pytest.param(lambda pair, *_: pair.launchers[1].terminate(), 50, 75, {0: "", 1: ""}, id="a signal"),
    ],
)
def test_what_happens_to_one_host_ends_both(
    hosts: list[Host],
    tiny_run: TinyRun,
    tmp_path: Path,
    harm: Callable[..., None],
    seconds: float,
    code: int,
    last_lines: dict[int, str],
) -> None:
    pair = training(hosts, tiny_run, tmp_path)
    ranks = [pid for number in last_lines for pid in children(pair.launchers[number].pid)]
    harm(pair, *hosts)
    for number, line in last_lines.items():
        found, output = pair.end(number, TIMEOUT + seconds + BUSY)
        assert found == code and re.match(line, output.splitlines()[-1]), output
    assert not any(alive(pid) for pid in ranks)


@pytest.mark.weekly
@pytest.mark.slow
def test_one_of_three_hosts_that_is_cut_off_is_named_by_the_others(tiny_run: TinyRun, tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    with hosts_with_a_switch(3) as hosts:
        pair = training(hosts, tiny_run, tmp_path, "phases.short.batch_rows=6", "phases.long.batch_rows=3")
        hosts[2].cut()
        ends = [pair.end(number, TIMEOUT + 15 + BUSY) for number in (0, 1, 2)]
    assert [code for code, _ in ends] == [124, 124, 124], ends
    for _, output in ends[:2]:
        assert output.splitlines()[-1].startswith("error: rank 2 on host-c: hangs: no sign of life")
    assert re.match(SILENT.replace("rank 1 on host-b", "rank 2 on host-c"), ends[2][1].splitlines()[-1])


@pytest.fixture
def hub() -> Iterator[tuple[Hub, list[Host]]]:
    reason = missing() or (None if os.access("/dev/net/tun", os.W_OK) else "no /dev/net/tun here")
    if reason is not None:
        pytest.skip(reason)
    with hosts_with_a_hub() as found:
        yield found


@pytest.mark.weekly
@pytest.mark.slow
def test_a_network_that_loses_a_third_of_all_packets_is_slow_and_no_more(
    hub: tuple[Hub, list[Host]], tiny_run: TinyRun, tmp_path: Path
) -> None:
    network, hosts = hub
    pair = Pair(hosts, tiny_run(*SHORT), tmp_path)
    wait_for_steps(tmp_path / "runs/tiny", 1, pair.launchers)
    network.loss = 0.3
    pair.succeed(250)


@pytest.mark.weekly
@pytest.mark.slow
def test_a_network_that_carries_no_collectives_blames_no_machine(
    hub: tuple[Hub, list[Host]], tiny_run: TinyRun, tmp_path: Path
) -> None:
    """Both ranks are alive and send heartbeats; a blamed machine would be excluded by the scheduler."""
    network, hosts = hub
    blamed = tmp_path / "blamed"
    pair = training(hosts, tiny_run, tmp_path, MODERNBERT_TRAIN_BLAMED=str(blamed))
    network.port = 29500
    for number in (0, 1):
        code, output = pair.end(number, 45 + BUSY)
        assert code == 124, output
        assert "a collective waited too long, and no rank is behind the others" in output.splitlines()[-1], output
    assert not blamed.exists(), blamed.read_text()


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("frozen", "seconds", "last", "before"),
    [
        (
            1,
            60,
            "warning: no launcher's farewell from host-b for 60 s",
            "this machine's ranks have finished; waiting for",
        ),
        # the next request to the store is never answered, and torch's agent would wait without a limit
        (0, 15, "10.77.0.1:29500, where the machines meet, does not answer", ""),
    ],
    ids=["it holds no store", "it holds the store"],
)
def test_a_launcher_that_is_frozen_after_a_finished_run_is_not_waited_for(
    hosts: list[Host], tiny_run: TinyRun, tmp_path: Path, frozen: int, seconds: float, last: str, before: str
) -> None:
    """The second launcher is frozen before it notices the end, and the first one waits for it."""
    pair = Pair(hosts, tiny_run(*SHORT), tmp_path)
    wait_for_steps(tmp_path / "runs/tiny", 2, pair.launchers)
    ranks = [pid for launcher in pair.launchers for pid in children(launcher.pid)]
    os.kill(pair.launchers[1].pid, signal.SIGSTOP)
    until(lambda: not any(map(alive, ranks)), 150)
    if frozen == 0:
        os.kill(pair.launchers[0].pid, signal.SIGSTOP)
        os.kill(pair.launchers[1].pid, signal.SIGCONT)
    code, output = pair.end(1 - frozen, seconds + BUSY)
    assert code == 0 and before in output and last in output.splitlines()[-1], output
    pair.kill(frozen)
