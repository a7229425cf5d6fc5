"""Two machines, as network namespaces of one: met, one lost, started again, and the same run at the end."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import warm
from tests.conftest import TinyRun
from tests.launch.hosts import Host, missing, two_hosts
from tests.launch.jobs import RUN, alive, children, environment, losses, wait_for_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(290)]
TIMEOUT = 8  # distributed.timeout_seconds
SILENT = r"error: rank 1 on host-b: 10\.77\.0\.1:\d+, where the ranks meet: no answer .* machine \(host-a, with rank 0"


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with two_hosts() as found:
        yield found


class Pair:
    """A run with one rank on each host; `first` is where they meet."""

    def __init__(self, hosts: tuple[Host, Host], words: list[str], folder: Path) -> None:
        self.logs = [folder / f"{host.name}.log" for host in hosts]
        endpoint = f"{hosts[0].address}:29500"
        self.launchers = []
        for number, (host, log) in enumerate(zip(hosts, self.logs, strict=True)):
            where = ["--ranks", "1", "--nodes", "2", "--node-rank", str(number), "--rendezvous", endpoint]
            with log.open("w") as output:
                self.launchers.append(host.start([*RUN, *words, *where], output, **environment()))

    def kill(self, number: int) -> None:
        """All processes of a run on one host, as when it loses its power."""
        launcher = self.launchers[number].pid
        for pid in [launcher, *children(launcher)]:
            os.kill(pid, signal.SIGKILL)
        self.launchers[number].wait()

    def end(self, number: int, seconds: float) -> tuple[int, str]:
        code = self.launchers[number].wait(seconds)
        return code, self.logs[number].read_text()


def test_a_lost_host_is_named_and_the_run_goes_on_as_if_never_stopped(
    hosts: tuple[Host, Host], tiny_run: TinyRun, tmp_path: Path
) -> None:
    changes = ("phases.short.tokens=8000", "checkpoint.interval_steps=4", f"distributed.timeout_seconds={TIMEOUT}")
    done = warm.run(
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
    code, output = pair.end(0, TIMEOUT + 30 + 30)  # stated: 30 seconds over the timeout; and 30 for a busy machine
    assert code == 70, output
    assert output.splitlines()[-1].startswith("error: rank 1 on host-b: is gone")
    again = Pair(hosts, words, tmp_path)
    for number in (0, 1):
        code, output = again.end(number, 150)
        assert code == 0, output
    assert losses(folder) == losses(tmp_path / "runs/whole") and len(losses(folder)) > 15


def test_a_cut_cable_ends_both_sides(hosts: tuple[Host, Host], tiny_run: TinyRun, tmp_path: Path) -> None:
    """Nothing is closed or refused, so only the silence tells; each side must come to an end by itself."""
    words = tiny_run(
        "phases.short.tokens=400000", "phases.short.batch_warmup=null", f"distributed.timeout_seconds={TIMEOUT}"
    )
    pair = Pair(hosts, words, tmp_path)
    wait_for_steps(tmp_path / "runs/tiny", 4, pair.launchers)
    ranks = [pid for launcher in pair.launchers for pid in children(launcher.pid)]
    hosts[1].cut()
    ends = [pair.end(number, TIMEOUT + 30 + 30) for number in (0, 1)]
    assert [code for code, _ in ends] == [124, 124], ends
    assert ends[0][1].splitlines()[-1].startswith("error: rank 1 on host-b: hangs: no sign of life")
    assert re.match(SILENT, ends[1][1].splitlines()[-1])
    assert not any(alive(pid) for pid in ranks)


def test_a_frozen_first_host_is_named_by_the_other(hosts: tuple[Host, Host], tiny_run: TinyRun, tmp_path: Path) -> None:
    """It holds what all meet through, so who asks waits; the other must not take its own healthy rank for frozen."""
    words = tiny_run(
        "phases.short.tokens=400000", "phases.short.batch_warmup=null", f"distributed.timeout_seconds={TIMEOUT}"
    )
    pair = Pair(hosts, words, tmp_path)
    wait_for_steps(tmp_path / "runs/tiny", 4, pair.launchers)
    launcher = pair.launchers[0].pid
    for pid in [launcher, *children(launcher)]:
        os.kill(pid, signal.SIGSTOP)
    code, output = pair.end(1, TIMEOUT + 30 + 30)
    assert code == 124, output
    assert re.match(SILENT, output.splitlines()[-1]), output


def test_a_signal_on_one_host_saves_on_both(hosts: tuple[Host, Host], tiny_run: TinyRun, tmp_path: Path) -> None:
    pair = Pair(hosts, tiny_run("phases.short.tokens=400000", "phases.short.batch_warmup=null"), tmp_path)
    wait_for_steps(tmp_path / "runs/tiny", 4, pair.launchers)
    pair.launchers[1].terminate()
    assert [pair.end(number, 90)[0] for number in (0, 1)] == [75, 75]


def test_the_first_host_that_is_lost_ends_the_other(
    hosts: tuple[Host, Host], tiny_run: TinyRun, tmp_path: Path
) -> None:
    """It held what all meet through, so nobody can tell; the address is what is left to name, by rank or launcher."""
    pair = Pair(hosts, tiny_run("phases.short.tokens=400000", "phases.short.batch_warmup=null"), tmp_path)
    wait_for_steps(tmp_path / "runs/tiny", 4, pair.launchers)
    pair.kill(0)
    code, output = pair.end(1, 90)
    assert code == 70
    assert re.search(r"error: (rank 1 on host-b: lost the machine|lost) 10\.77\.0\.1:\d+", output.splitlines()[-1])
