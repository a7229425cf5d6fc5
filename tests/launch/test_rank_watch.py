"""Launchers exchange errors: a failure of one machine's ranks reaches the others and ends their ranks.

If this breaks, a killed rank costs all machines the whole timeout, with a hang's exit code; and a rank inside a CUDA
call outlives an error by half an hour.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore

import launch.rank_watch
from launch.rank_watch import RankWatch
from launch.topology import Topology
from modernbert_train.distributed.fail_together import ERROR
from modernbert_train.distributed.group import STORE_PREFIX
from tests.support.waiting import until

HERE = socket.gethostname()
DEAF = "import time; time.sleep(600)"


class Machine:
    """This machine's ranks, which are scripted processes, and their launcher's watch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "ranks" / "beats"
        self.folder.mkdir(parents=True)
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.errors = PrefixStore(STORE_PREFIX, self.store)
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.watches: list[RankWatch] = []  # one that is never stopped would end its process: this one
        self.asked_to_stop = False

    def start(self, *programs: str) -> RankWatch:
        for number, program in enumerate(programs):
            self.ranks.append(subprocess.Popen([sys.executable, "-c", program]))
            (self.folder / str(number)).write_text(str(self.ranks[-1].pid))
        watch = RankWatch(self.folder, 600.0, Topology(1, len(programs)), lambda: self.asked_to_stop)
        self.watches.append(watch)
        watch.connect(self.store)
        return watch

    def told(self) -> dict[str, Any] | None:
        return json.loads(self.errors.get(ERROR)) if self.errors.check([ERROR]) else None


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    for watch in machine.watches:
        watch.stop()
    for rank in machine.ranks:
        rank.kill()
        rank.wait()


@pytest.mark.runs
def test_a_killed_rank_is_reported_to_all_machines_at_once(machine: Machine) -> None:
    """No other rank of its machine notices the end of the first one."""
    watch = machine.start(DEAF, DEAF)
    machine.ranks[0].kill()
    until(machine.told, 3)
    entry = machine.told()
    assert entry is not None and (entry["rank"], entry["host"], entry["code"]) == (0, HERE, 70)
    assert entry["text"].startswith("is gone: it was ended by SIGKILL") and "memory" in entry["text"]
    assert entry["blames"]
    watch.disconnect()
    assert watch.first_error == entry


@pytest.mark.runs
def test_a_rank_that_ends_by_itself_is_reported_with_its_code(machine: Machine) -> None:
    """It was not killed, so its machine is not to blame, and no scheduler excludes it."""
    machine.start("import os; os._exit(3)", DEAF)
    until(machine.told)
    assert machine.told() | {"text": ""} == {"rank": 0, "host": HERE, "text": "", "blames": False, "code": 3}


@pytest.mark.runs
def test_an_error_of_another_machine_ends_a_rank_that_does_not_hear_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is inside CUDA and holds the interpreter's lock. A rank that leaves gets more time."""
    monkeypatch.setattr(launch.rank_watch, "_HEARD_SECONDS", 0.5)
    watch = machine.start(DEAF, DEAF)
    (machine.folder / "1").write_text(f"{machine.ranks[1].pid} left")
    error = {"rank": 7, "host": "elsewhere", "text": "a shard is damaged", "blames": True, "code": 65}
    machine.errors.set(ERROR, json.dumps(error))
    assert machine.ranks[0].wait(20) == -signal.SIGKILL
    watch.disconnect()
    assert watch.deaf == {0} and watch.first_error == error and machine.ranks[1].poll() is None


@pytest.mark.runs
@pytest.mark.parametrize("ended", ["stopped", "finished", "left", "asked"])
def test_an_end_in_order_is_no_error(machine: Machine, ended: str) -> None:
    """Otherwise every stop by a signal, and every end of a run, would be a fault on all machines."""
    if ended == "asked":
        machine.asked_to_stop = True
    program = {"stopped": "import os; os._exit(75)", "finished": "pass"}.get(ended, DEAF)
    watch = machine.start(DEAF, program)
    if ended == "left":
        (machine.folder / "1").write_text(f"{machine.ranks[1].pid} left")
    if ended in ("left", "asked"):
        machine.ranks[1].kill()
        machine.ranks[1].wait()  # as the agent may, before the watch has seen it
    else:
        until(lambda: not launch.rank_watch.ranks_in(machine.folder)[1].runs)
    time.sleep(0.5)
    watch.disconnect()
    assert machine.told() is None


@pytest.mark.runs
def test_how_the_ranks_ended_is_reported_when_they_never_came(machine: Machine) -> None:
    """They failed before they met the others: only the agent knows how they ended."""
    watch = machine.start()
    watch.disconnect()
    watch.post_outcome(78, f"rank 4 on {HERE} ended first, with exit code 78; its error is above", blames=False)
    entry = machine.told()
    assert entry is not None and entry["rank"] is None and entry["code"] == 78 and entry["text"].startswith("rank 4")


def test_a_rank_that_has_not_said_its_process_is_not_looked_for() -> None:
    """Otherwise the watch of a slow start would end with EINVAL, and miss ranks that are lost later."""
    assert launch.rank_watch.exit_code(0) is None
