"""Several machines, as network namespaces of one: connected, one lost, restarted, with the same result."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launch.hosts import Host, hosts_with_a_hub, missing, three_hosts, two_hosts
from tests.launch.hub import Hub
from tests.support import forked
from tests.support.jobs import LONG, RUN, SHORT, alive, children, environment, losses, wait_for_steps
from tests.support.tiny_run import TinyRun

pytestmark = pytest.mark.timeout(290)
TIMEOUT = 8  # distributed.timeout_seconds
BUSY = 30  # additional seconds for a busy machine
HEARD = 1.5  # seconds until each rank knows the others and their machines
SILENT = r"error: rank 1 on host-b: 10\.77\.0\.1:\d+, where the ranks meet: no answer .* machine \(host-a, with rank 0"


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with two_hosts() as found:
        yield found


class Pair:
    """A run with one rank on each of two or more hosts; the first host is the rendezvous."""

    def __init__(
        self, hosts: tuple[Host, ...], words: list[str], folder: Path, meets: str = "", **variables: str
    ) -> None:
        self.logs = [folder / f"{host.name}.log" for host in hosts]
        endpoint = f"{meets or hosts[0].address}:29500"
        self.launchers = []
        for number, (host, log) in enumerate(zip(hosts, self.logs, strict=True)):
            where = f"--ranks=1 --nodes={len(hosts)} --node-rank={number} --rendezvous={endpoint}".split()
            with log.open("w") as output:
                self.launchers.append(host.start([*RUN, *words, *where], output, **environment(**variables)))

    def kill(self, number: int) -> None:
        """Kill all processes of a run on one host, as in a power loss."""
        launcher = self.launchers[number].pid
        for pid in [launcher, *children(launcher)]:
            os.kill(pid, signal.SIGKILL)
        self.launchers[number].wait()

    def end(self, number: int, seconds: float) -> tuple[int, str]:
        code = self.launchers[number].wait(seconds)
        return code, self.logs[number].read_text()


@pytest.mark.runs
def test_a_name_that_is_a_loopback_address_at_home_is_no_place_to_meet(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Debian and Ubuntu write 127.0.1.1 for a machine's own name, which other machines cannot reach."""
    if reason := missing():
        pytest.skip(reason)
    with two_hosts("192.168.77") as hosts:
        for host in hosts:
            host.write_etc_hosts({each.name: each.address if each != host else "127.0.1.1" for each in hosts})
        pair = Pair(hosts, tiny_run(*SHORT), tmp_path, meets="host-a")
        for number in (0, 1):
            code, output = pair.end(number, 150)
            assert code == 0, output


@pytest.mark.weekly
@pytest.mark.slow
def test_a_first_machine_that_is_a_loopback_address_elsewhere_is_reported(
    hosts: tuple[Host, Host], tiny_run: TinyRun, tmp_path: Path
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
    hosts: tuple[Host, Host], tiny_run: TinyRun, tmp_path: Path
) -> None:
    changes = ("phases.short.tokens=8000", "checkpoint.interval_steps=4", f"distributed.timeout_seconds={TIMEOUT}")
    done = forked.run(
        [*RUN, *tiny_run("name=whole", *changes), "--ranks", "2"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    words, folder = tiny_run("name=lost", *changes), tmp_path / "runs/lost"
    pair = Pair(hosts, words, tmp_path)
    wait_for_steps(folder, 6, pair.launchers)
    pair.kill(1)
    code, output = pair.end(0, TIMEOUT + 30 + 30)  # documented: timeout plus 30 seconds; 30 more for a busy machine
    assert code == 70, output
    assert output.splitlines()[-1].startswith("error: rank 1 on host-b: is gone")
    again = Pair(hosts, words, tmp_path)
    for number in (0, 1):
        code, output = again.end(number, 150)
        assert code == 0, output
    assert losses(folder) == losses(tmp_path / "runs/whole") and len(losses(folder)) > 15


def training(hosts: tuple[Host, ...], tiny_run: TinyRun, folder: Path, *changes: str, **variables: str) -> Pair:
    """Return a long run in its fourth step or later, in which every rank knows the others."""
    words = tiny_run(*LONG, f"distributed.timeout_seconds={TIMEOUT}", *changes)
    pair = Pair(hosts, words, folder, **variables)
    wait_for_steps(folder / "runs/tiny", 4, pair.launchers)
    time.sleep(HEARD)
    return pair


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.parametrize("lose", [Host.cut, Host.lose_packets_to], ids=["cable", "one way"])
def test_a_way_that_is_lost_ends_both_sides(
    hosts: tuple[Host, Host], tiny_run: TinyRun, tmp_path: Path, lose: Callable[..., None]
) -> None:
    """Nothing is closed or refused, so only the silence is noticed; each side must end by itself."""
    pair = training(hosts, tiny_run, tmp_path)
    ranks = [pid for launcher in pair.launchers for pid in children(launcher.pid)]
    lose(hosts[1], *hosts[: lose is Host.lose_packets_to])
    ends = [pair.end(number, TIMEOUT + 15 + BUSY) for number in (0, 1)]
    assert [code for code, _ in ends] == [124, 124], ends
    assert ends[0][1].splitlines()[-1].startswith("error: rank 1 on host-b: hangs: no sign of life")
    assert re.match(SILENT, ends[1][1].splitlines()[-1])
    assert not any(alive(pid) for pid in ranks)


@pytest.mark.weekly
@pytest.mark.slow
def test_a_frozen_first_host_is_named_by_the_other(hosts: tuple[Host, Host], tiny_run: TinyRun, tmp_path: Path) -> None:
    """It holds the store, so requests to it block; the other must not take its own healthy rank for frozen."""
    pair = training(hosts, tiny_run, tmp_path)
    launcher = pair.launchers[0].pid
    for pid in [launcher, *children(launcher)]:
        os.kill(pid, signal.SIGSTOP)
    code, output = pair.end(1, TIMEOUT + 30 + 30)
    assert code == 124, output
    assert re.match(SILENT, output.splitlines()[-1]), output


@pytest.mark.weekly
@pytest.mark.slow
def test_a_signal_on_one_host_saves_on_both(hosts: tuple[Host, Host], tiny_run: TinyRun, tmp_path: Path) -> None:
    pair = training(hosts, tiny_run, tmp_path)
    pair.launchers[1].terminate()
    assert [pair.end(number, 90)[0] for number in (0, 1)] == [75, 75]


@pytest.mark.weekly
@pytest.mark.slow
def test_the_first_host_that_is_lost_ends_the_other(
    hosts: tuple[Host, Host], tiny_run: TinyRun, tmp_path: Path
) -> None:
    """It held the store, so no message can be exchanged; only its address can be named, by a rank or a launcher."""
    pair = training(hosts, tiny_run, tmp_path)
    pair.kill(0)
    code, output = pair.end(1, 90)
    assert code == 70
    assert re.search(r"error: (rank 1 on host-b: lost the machine|lost) 10\.77\.0\.1:\d+", output.splitlines()[-1])


@pytest.mark.weekly
@pytest.mark.slow
def test_one_of_three_hosts_that_is_cut_off_is_named_by_the_others(tiny_run: TinyRun, tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    with three_hosts() as hosts:
        pair = training(hosts, tiny_run, tmp_path, "phases.short.batch_rows=6", "phases.long.batch_rows=3")
        hosts[2].cut()
        ends = [pair.end(number, TIMEOUT + 15 + BUSY) for number in (0, 1, 2)]
    assert [code for code, _ in ends] == [124, 124, 124], ends
    for _, output in ends[:2]:
        assert output.splitlines()[-1].startswith("error: rank 2 on host-c: hangs: no sign of life")
    assert re.match(SILENT.replace("rank 1 on host-b", "rank 2 on host-c"), ends[2][1].splitlines()[-1])


@pytest.fixture
def hub() -> Iterator[tuple[Hub, tuple[Host, Host]]]:
    reason = missing() or (None if os.access("/dev/net/tun", os.W_OK) else "no /dev/net/tun here")
    if reason is not None:
        pytest.skip(reason)
    with hosts_with_a_hub() as found:
        yield found


@pytest.mark.weekly
@pytest.mark.slow
def test_a_network_that_loses_a_third_of_all_packets_is_slow_and_no_more(
    hub: tuple[Hub, tuple[Host, Host]], tiny_run: TinyRun, tmp_path: Path
) -> None:
    network, hosts = hub
    pair = Pair(hosts, tiny_run(*SHORT), tmp_path)
    wait_for_steps(tmp_path / "runs/tiny", 1, pair.launchers)
    network.loss = 0.3
    for number in (0, 1):
        code, output = pair.end(number, 250)
        assert code == 0, output


@pytest.mark.weekly
@pytest.mark.slow
def test_a_network_that_carries_no_collectives_blames_no_machine(
    hub: tuple[Hub, tuple[Host, Host]], tiny_run: TinyRun, tmp_path: Path
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
def test_a_launcher_that_is_frozen_after_a_finished_run_is_not_waited_for(
    hosts: tuple[Host, Host], tiny_run: TinyRun, tmp_path: Path
) -> None:
    pair = _with_finished_ranks(hosts, tiny_run(*SHORT), tmp_path)
    code, output = pair.end(0, 60 + BUSY)
    assert code == 0, output
    assert "this machine's ranks have finished; waiting for the other machines, up to 60 s" in output
    assert "warning: no launcher's farewell from host-b for 60 s" in output.splitlines()[-1], output
    pair.kill(1)


@pytest.mark.weekly
@pytest.mark.slow
def test_a_frozen_launcher_that_holds_the_store_is_not_waited_for_either(
    hosts: tuple[Host, Host], tiny_run: TinyRun, tmp_path: Path
) -> None:
    """Its next request to the store is never answered, and torch's agent would wait without a limit."""
    pair = _with_finished_ranks(hosts, tiny_run(*SHORT), tmp_path)
    os.kill(pair.launchers[0].pid, signal.SIGSTOP)
    os.kill(pair.launchers[1].pid, signal.SIGCONT)
    code, output = pair.end(1, 15 + BUSY)
    assert code == 0, output
    assert "10.77.0.1:29500, where the machines meet, does not answer" in output.splitlines()[-1], output
    pair.kill(0)


def _with_finished_ranks(hosts: tuple[Host, Host], words: list[str], folder: Path) -> Pair:
    """Run to the end, with the second launcher frozen before it notices; the first one waits for it."""
    pair = Pair(hosts, words, folder)
    wait_for_steps(folder / "runs/tiny", 2, pair.launchers)
    ranks = [pid for launcher in pair.launchers for pid in children(launcher.pid)]
    os.kill(pair.launchers[1].pid, signal.SIGSTOP)
    deadline = time.monotonic() + 150
    while any(map(alive, ranks)):
        assert time.monotonic() < deadline, "the run does not end"
        time.sleep(0.1)
    return pair
