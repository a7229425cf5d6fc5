"""Faults as GPUs bring them: what the product says, on which machine, after how long, and with which exit code.

Two launchers of two ranks, torch's real ProcessGroupNCCL and its watchdog, on a device that waits as a GPU does; what
NCCL itself does is not seen here. With NCCL the main thread hears nothing of a lost peer, ever: if this breaks, a fault
costs a cluster its whole timeout, or the night, and somebody looks at the wrong machine.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import make_tiny_data
from tests.cuda_build.front_door import Machine
from tests.cuda_build.two_machines import End, Pair, started, why_not
from tests.launch.jobs import children

pytestmark = [pytest.mark.runs, pytest.mark.slow, pytest.mark.timeout(600)]

TIMEOUT = 20  # distributed.timeout_seconds, of 300; a silent rank has no longer
SOON, IN_TIME = 15.0, TIMEOUT + 20.0  # limits for machines with more processes than cores
ALL = "0:{0},1:{0},2:{0},3:{0}"


class Case(NamedTuple):
    """A fault, what every launcher that is left says, its exit code, and after how many seconds at most."""

    fault: str
    says: str
    code: int
    seconds: float


FAULTS = {
    "a rank that is killed": Case("3:kill", "rank 3 on node-1", 70, SOON),
    "the first rank of a machine that is killed": Case("2:kill", "rank 2 on node-1", 70, SOON),
    "an uncorrectable error of a GPU's memory": Case("2:ecc", "rank 2 on node-1: AcceleratorError", 70, SOON),
    "a frozen process": Case("2:stop", "rank 2 on node-1", 124, IN_TIME),
    "a host that does not come on": Case("3:host", "rank 3 on node-1: hangs: it has not come beyond", 124, IN_TIME),
    "a GPU that hangs": Case("1:gpu", "rank 1 on node-0: hangs: its GPU has started", 124, IN_TIME),
    "a collective that never ends": Case(ALL.format("network"), "no rank is behind the others", 124, IN_TIME),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    return make_tiny_data(tmp_path_factory.mktemp("text"))


@pytest.fixture
def machine(tmp_path: Path, data: Path) -> Machine:
    return Machine(tmp_path, data, gpus=4)


def run(machine: Machine, *more: str) -> list[str]:
    """A run of minutes, eagerly, so that it starts in seconds."""
    return machine.words(
        "run", "compute.compile=false", f"distributed.timeout_seconds={TIMEOUT}", "phases.short.tokens=400000",
        "phases.short.batch_rows=8", "phases.short.batch_warmup=null", "data.validation=null", *more,
    )  # fmt: skip


def require(pair: Pair, ends: list[End], case: Case, name: str) -> None:
    for end in ends:
        assert end.code == case.code and case.says in end.last, (end.code, end.seconds, end.output[-3000:])
        assert end.seconds < case.seconds
    assert all(not children(process.pid) for process in pair.processes)  # nothing is left on either machine
    row = {"fault": name, "says": ends[0].last[:120], "codes": [end.code for end in ends],
           "seconds": [round(end.seconds, 1) for end in ends]}  # fmt: skip
    if "FAULT_TABLE" in os.environ:
        with Path(os.environ["FAULT_TABLE"]).open("a", encoding="utf-8") as table:
            table.write(json.dumps(row) + "\n")


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_step_is_named_on_every_machine(machine: Machine, name: str) -> None:
    case = FAULTS[name]
    with started(machine, run(machine), case.fault) as pair:
        pair.until_settled("run", 300)
        pair.when.touch()
        require(pair, pair.ends(case.seconds + 60), case, name)


@pytest.mark.parametrize("told", [False, True], ids=["silently", "with errors of NCCL"])
def test_a_lost_machine_is_named_and_not_one_that_waits_for_it(machine: Machine, told: bool) -> None:
    """The connections to it may break, and torch's watchdog then ends the ranks that are left, after a while."""
    case = Case("0:remote,1:remote" if told else "", "on node-1: hangs: no sign of life", 124, IN_TIME)
    with started(machine, run(machine), case.fault) as pair:
        pair.until_settled("run", 300)
        pair.lose(1)
        pair.when.touch()
        name = f"a machine that is lost{', and NCCL that says so' if told else ''}"
        require(pair, pair.ends(case.seconds + 60, missing=[1]), case, name)


def test_nccl_that_does_not_connect_is_told(machine: Machine) -> None:
    """A firewall: ncclCommInitRank waits for ever, and prints nothing."""
    case = Case(ALL.format("unconnected"), "NCCL does not connect the GPUs", 124, 200)  # from the start on
    with started(machine, run(machine), case.fault) as pair:
        require(pair, pair.ends(case.seconds), case, "NCCL that does not connect (from the start)")


def test_a_first_step_longer_than_the_timeout_is_waited_for_and_a_signal_saves(machine: Machine) -> None:
    """One machine compiles with a cold cache. Then the job is stopped, as a scheduler does."""
    with started(machine, run(machine), "3:slow", TIMEOUT + 20) as pair:
        pair.until_told("training the first batch", 300)
        pair.when.touch()
        pair.until_settled("run", 400)
        for process in pair.processes:
            (shell,) = children(process.pid)
            os.kill(children(shell)[0], signal.SIGTERM)
        ends = pair.ends(100)
    assert [end.code for end in ends] == [75, 75], [end.output[-2000:] for end in ends]
    assert "checkpoint written" in ends[0].output
