"""Faults as on GPUs: the product's message, the blamed machine, the time, and the exit code.

Two launchers of two ranks, torch's real ProcessGroupNCCL and its watchdog, on a device that waits like a GPU; NCCL
itself is simulated. With NCCL the main thread never learns of a lost peer: if this breaks, a fault costs a cluster its
whole timeout, or the night, and the wrong machine is examined.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cuda_build.front_door import Machine
from tests.cuda_build.two_machines import End, Pair, started, why_not
from tests.support.jobs import children

pytestmark = [pytest.mark.runs, pytest.mark.slow, pytest.mark.timeout(600)]

TIMEOUT = 20  # distributed.timeout_seconds, instead of 300; also the limit of a silent rank
PATIENT = 120  # the same for faults that are found without waiting
SOON, IN_TIME = 30.0, TIMEOUT + 20.0  # limits for machines with more processes than cores
ALL = "0:{0},1:{0},2:{0},3:{0}"
RAISED = "RuntimeError: a mistake of the program. Its own output has the traceback."
BEHIND = "hangs: it has not come beyond"


class Case(NamedTuple):
    """A fault, the message of every remaining launcher, its exit code, the maximum seconds, and the machine that a
    scheduler should exclude; overrides of the run, more words of the first message, and whether all else is finite."""

    fault: str
    says: str
    code: int
    seconds: float
    blamed: str
    more: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    finite: bool = False


FAULTS = {
    "a rank that is killed": Case("3:kill", "rank 3 on node-1", 70, SOON, "node-1"),
    "the first rank of a machine that is killed": Case("2:kill", "rank 2 on node-1", 70, SOON, "node-1"),
    "an uncorrectable error of a GPU's memory": Case("2:ecc", "rank 2 on node-1: AcceleratorError", 70, SOON, "node-1"),
    "a rank that raises": Case("2:raise", f"rank 2 on node-1: {RAISED}", 70, SOON, ""),
    "a frozen process": Case("2:stop", "rank 2 on node-1", 124, IN_TIME, "node-1"),
    "a host that does not come on": Case("3:host", f"rank 3 on node-1: {BEHIND}", 124, IN_TIME, "node-1"),
    "a host that stays in the sums of a step": Case("3:sums", f"rank 3 on node-1: {BEHIND}", 124, IN_TIME, "node-1"),
    "a GPU that hangs": Case("1:gpu", "rank 1 on node-0: hangs: its GPU has started", 124, IN_TIME, "node-0"),
    "a collective that never ends": Case(ALL.format("network"), "no rank is behind the others", 124, IN_TIME, ""),
    # another process takes the memory of a step; that machine is healthy, so the next start may use it
    "a GPU without memory": Case(
        "2:memory", "rank 2 on node-1: step", 70, SOON, "",
        more=("phases.short.batch_rows=32", "phases.short.microbatch_tokens=512"),
        advice=("ran out of memory with microbatches of 8 rows of 64 tokens", "`nvidia-smi` says who",
                "phases.short.microbatch_tokens=256"),
    ),
    # all ranks learn of it and repeat the step: a faulty GPU must not be used again at each start
    "a loss that is not finite": Case(
        "2:nan", "rank 2, microbatch 0, nothing wrong when computed again, which points to the hardware of node-1",
        70, SOON, "node-1", finite=True,
    ),
}  # fmt: skip


IN_CI = ("the first rank of a machine that is killed", "a rank that raises")  # found within seconds


@pytest.fixture
def machine(tmp_path: Path, tiny_data: Path) -> Machine:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    return Machine(tmp_path, tiny_data, gpus=4)


def run(machine: Machine, *more: str, timeout: int = TIMEOUT) -> list[str]:
    """Return a run of minutes, eager, so that it starts in seconds."""
    return machine.words(
        "run", "compute.compile=false", f"distributed.timeout_seconds={timeout}", "phases.short.tokens=400000",
        "phases.short.batch_rows=8", "phases.short.batch_warmup=null", "data.validation=null", *more,
    )  # fmt: skip


def require(pair: Pair, ends: list[End], case: Case, name: str) -> None:
    for end in ends:
        assert end.code == case.code and case.says in end.last, (end.code, end.seconds, end.output[-3000:])
        assert end.blamed == case.blamed, (end.blamed, end.last)
        assert end.seconds < case.seconds
    assert all(words in ends[0].last for words in case.advice)
    assert all(not children(process.pid) for process in pair.processes)  # no process is left on either machine
    row = {"fault": name, "says": ends[0].last, "blamed": ends[0].blamed, "codes": [end.code for end in ends],
           "seconds": [round(end.seconds, 1) for end in ends]}  # fmt: skip
    if "FAULT_TABLE" in os.environ:
        with Path(os.environ["FAULT_TABLE"]).open("a", encoding="utf-8") as table:
            table.write(json.dumps(row) + "\n")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.cuda_quick] * (name in IN_CI)) for name in FAULTS]
)
def test_a_fault_in_a_step_is_named_on_every_machine(machine: Machine, name: str) -> None:
    case = FAULTS[name]
    if case.finite:
        machine.settings["NULL_DEVICE_TRUE"] = "1"
    words = run(machine, *case.more, timeout=PATIENT if case.seconds == SOON else TIMEOUT)
    with started(machine, words, case.fault) as pair:
        pair.until_settled("run", 300)
        pair.when.touch()
        require(pair, pair.ends(case.seconds + 60), case, name)


def test_compiled_ranks_hear_of_an_error(machine: Machine) -> None:
    """A rank raises between two steps, and the others launch a whole step after a sum that it never joins."""
    case = Case("2:raise", f"rank 2 on node-1: {RAISED}", 70, SOON, "")
    more = ("compute.compile=true", "phases.short.batch_rows=128")  # thousands of launches in a step
    words = run(machine, *more, timeout=PATIENT)
    with started(machine, words, case.fault) as pair:
        pair.until_settled("run", 500)
        pair.when.touch()
        ends = pair.ends(case.seconds + 60)
        require(pair, ends, case, "a rank that raises, compiled")
    assert ends[0].output.count("error: rank 2 on node-1") == 3  # the launcher and both of its ranks


@pytest.mark.parametrize("told", [False, True], ids=["silently", "with errors of NCCL"])
def test_a_lost_machine_is_named_and_not_one_that_waits_for_it(machine: Machine, told: bool) -> None:
    """Connections to it may break, and torch's watchdog then ends the remaining ranks, after a while."""
    case = Case("0:remote,1:remote" if told else "", "on node-1: hangs: no sign of life", 124, IN_TIME, "node-1")
    with started(machine, run(machine), case.fault) as pair:
        pair.until_settled("run", 300)
        pair.lose(1)
        pair.when.touch()
        name = f"a machine that is lost{', and NCCL that says so' if told else ''}"
        require(pair, pair.ends(case.seconds + 60, missing=[1]), case, name)


def test_nccl_that_does_not_connect_is_reported(machine: Machine) -> None:
    """A firewall: ncclCommInitRank waits for ever, and prints nothing."""
    case = Case(ALL.format("unconnected"), "NCCL does not connect the GPUs", 124, 200, "")  # from the start on
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
