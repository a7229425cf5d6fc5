"""`train` on a CUDA device that computes nothing: everything that the host does in a step, for each way to train.

If this breaks, a first run on a GPU meets an error of devices, dtypes or shapes, waits for the device where it should
not, or writes a checkpoint of memory that has not been copied yet. What a kernel computes, and how long that takes, is
not seen here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cuda_build import null
from tests.cuda_build.tables import compare

pytestmark = [pytest.mark.runs, pytest.mark.timeout(1200)]

CASES = [
    *("varlen eager alone", "varlen fused alone", "varlen compiled alone", "flex eager alone"),
    *("varlen eager ddp", "varlen compiled ddp", "varlen eager fsdp2", "varlen compiled fsdp2"),
]
PLANTED = ["no wait for the copies", "a wait more", "no wait of the device"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All cases, one after the other in one process."""
    folder = tmp_path_factory.mktemp("runs")
    planted = [f"varlen eager alone {mistake}" for mistake in PLANTED]
    found: dict[str, Any] = null.run(
        "train_step", str(folder), *sorted(CASES + planted, key=lambda case: "alone" not in case)
    )
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_through_and_waits_once_a_step(runs: dict[str, Any], case: str) -> None:
    """One wait for the stream, for the numbers of the step; and one for what the step before left to be read, with a
    whole step queued behind it. Memory is not asked for again and again, nothing that is being copied is touched."""
    found = runs[case]
    assert found["outcome"] == "done" and found["faults"] == []
    waits = {name: times for name, times in found["step"].items() if name.startswith("wait")}
    assert waits == {"wait cudaStreamSynchronize": 1, "wait cudaEventSynchronize": 1}
    assert found["step"].get("cudaMalloc", 0) <= 1  # a block more, where runs before in this process left holes
    assert found["graph_breaks"] == 0


def test_what_a_step_asks_for_is_on_record(runs: dict[str, Any]) -> None:
    """Launches, products, copies, collectives, graphs: a change that adds to one of them is seen."""
    kept = {case: {**runs[case]["step"], "graphs": runs[case]["graphs"]} for case in CASES}
    for each in kept.values():
        for allocation in ("cudaMalloc", "cudaHostAlloc"):  # by whoever comes first, now or a step later
            each.pop(allocation, None)
    compare("train_step", kept)


def test_the_peak_of_memory_is_on_record(runs: dict[str, Any]) -> None:
    compare("train_step_peak", {case: runs[case]["peak"] for case in CASES}, within=0.05)


def test_a_checkpoint_read_before_it_is_copied_is_seen(runs: dict[str, Any]) -> None:
    """The null device copies when somebody waits, and not before: the first time that the copier's wait is on trial."""
    assert "not finite" in runs["varlen eager alone no wait for the copies"]["outcome"]


def test_the_device_waits_with_the_update_for_the_copies(runs: dict[str, Any]) -> None:
    """Else weights would change while they are copied; two waits of streams, one each way."""
    assert runs["varlen eager alone"]["waits_of_device_after_checkpoint"] == 2
    assert runs["varlen eager alone no wait of the device"]["waits_of_device_after_checkpoint"] == 1


def test_a_second_wait_in_a_step_is_seen(runs: dict[str, Any]) -> None:
    assert runs["varlen eager alone a wait more"]["step"]["wait cudaStreamSynchronize"] == 2


def test_the_device_notices_memory_that_is_touched_while_it_is_copied(tmp_path: Path) -> None:
    """Else the counts of no faults above would say nothing."""
    found = null.run("touched")
    assert found == {"waited": [], "changed": ["FAULT changed before it was copied"], "early": True, "late": 0.0}
