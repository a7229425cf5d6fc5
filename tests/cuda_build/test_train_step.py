"""`train` on a CUDA device that computes nothing: all host work of a step, for each way to train.

If this breaks, a first run on a GPU meets an error of devices, dtypes or shapes, waits for the device unnecessarily, or
writes a checkpoint before its copies are complete. Values and durations of kernels are not simulated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cuda_build import null
from tests.cuda_build.tables import compare

pytestmark = [pytest.mark.runs, pytest.mark.timeout(1200)]

ONE_GROUP = [
    *("varlen eager alone", "varlen fused alone", "varlen compiled alone", "flex eager alone", "flex compiled alone"),
    *("flash2 eager alone", "flash2 compiled alone", "flash3 eager alone", "flash3 compiled alone"),
    *("varlen eager ddp", "varlen compiled ddp", "varlen eager fsdp2", "varlen compiled fsdp2"),
]
COPIES = ["varlen eager hsdp", "varlen compiled hsdp"]
CASES = ONE_GROUP + COPIES
PLANTED = [
    *("varlen eager alone no wait for the copies", "varlen eager alone a wait more"),
    *("varlen eager alone no wait of the device", "flash2 eager alone boundaries of 64 bits"),
]
WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}  # else they would dominate memory


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all cases, one after the other in one process for each group of ranks."""
    folder = str(tmp_path_factory.mktemp("runs"))
    by_group = (sorted(ONE_GROUP + PLANTED, key=lambda case: "alone" not in case), COPIES)
    found = [null.run("train_step", folder, *cases, **WORKSPACES) for cases in by_group]
    return found[0] | found[1]  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_through_and_waits_once_a_step(runs: dict[str, Any], case: str) -> None:
    """One stream synchronization for the step's numbers; and one for the previous step's pending value, while a whole
    step is queued. Memory is not allocated repeatedly, and memory that is being copied is not touched."""
    found = runs[case]
    assert found["outcome"] == "done" and found["faults"] == []
    waits = {name: times for name, times in found["step"].items() if name.startswith("wait")}
    assert waits == {"wait cudaStreamSynchronize": 1, "wait cudaEventSynchronize": 1}
    assert found["step"].get("cudaMalloc", 0) <= 1  # one more block, if earlier runs in this process left gaps
    assert found["graph_breaks"] == 0


def test_what_a_step_asks_for_is_on_record(runs: dict[str, Any]) -> None:
    """Launches, products, copies, collectives, graphs: an additional one is noticed."""
    kept = {case: {**runs[case]["step"], "graphs": runs[case]["graphs"]} for case in CASES}
    for each in kept.values():
        for allocation in ("cudaMalloc", "cudaHostAlloc"):  # these may occur in this step or the next
            each.pop(allocation, None)
    compare("train_step", kept)


def test_the_peak_of_memory_is_what_plan_says_and_on_record(runs: dict[str, Any]) -> None:
    """For a small model, whose largest part is the update, or FSDP2's gathered weights; base: test_gpu_tests.py."""
    found = {case: {"found": runs[case]["peak"], "planned": runs[case]["planned"]} for case in CASES}
    for case, each in found.items():
        assert 0.75 <= each["found"] / each["planned"] <= 1.1, (case, each)
    compare("train_step_peak", {case: each["found"] for case, each in found.items()}, within=0.05)


def test_a_checkpoint_costs_a_step_its_copies_and_no_wait(runs: dict[str, Any]) -> None:
    """In the next step: one copy for each tensor into pinned memory, and two waits between streams. Other waits are the
    writer's, in a separate thread."""
    for case in CASES:
        step, after = runs[case]["step"], runs[case]["after_checkpoint"]
        assert after["wait cudaStreamSynchronize"] == 1, case
        more = {name: after[name] - step.get(name, 0) for name in after if not name.startswith(("wait", "cuda"))}
        copies = more.pop("copy behind device to pinned")
        assert {name: times for name, times in more.items() if times} == {
            "event recorded": 2, "stream waits for event": 2,
        }, case  # fmt: skip
        assert copies > 0, case


def test_a_checkpoint_pins_what_it_copies_in_one_piece(runs: dict[str, Any]) -> None:
    """Tensor by tensor it was 1.7 times the share: each was rounded up to a power of two."""
    for case in CASES:
        (times, pinned), (copies, copied) = runs[case]["pinned"], runs[case]["copied"]
        assert times == 1 and copied - 64 <= pinned <= copied + 64 * copies, case


def test_a_checkpoint_read_before_it_is_copied_is_seen(runs: dict[str, Any]) -> None:
    """The null device copies only when a thread waits for it, which tests the copier's wait."""
    assert "not finite" in runs["varlen eager alone no wait for the copies"]["outcome"]


def test_the_device_waits_with_the_update_for_the_copies(runs: dict[str, Any]) -> None:
    """Otherwise weights would change while they are copied; two waits between streams, one each way."""
    waits = "stream waits for event"
    assert runs["varlen eager alone"]["after_checkpoint"][waits] == 2
    assert runs["varlen eager alone no wait of the device"]["after_checkpoint"][waits] == 1


def test_flash_attention_is_called_with_what_it_takes(runs: dict[str, Any]) -> None:
    """In bf16, with 32-bit boundaries on the device: a stand-in with its arguments and checks."""
    assert "dtype int32" in runs["flash2 eager alone boundaries of 64 bits"]["outcome"]


def test_a_second_wait_in_a_step_is_seen(runs: dict[str, Any]) -> None:
    assert runs["varlen eager alone a wait more"]["step"]["wait cudaStreamSynchronize"] == 2


def test_the_device_notices_memory_that_is_touched_while_it_is_copied(tmp_path: Path) -> None:
    """Otherwise the absence of faults above would prove nothing."""
    found = null.run("touched")
    changed, freed = ["FAULT changed before it was copied"], ["FAULT freed before it was copied"]
    assert found == {"waited": [], "changed": changed, "freed": freed, "early": True, "late": 0.0}
