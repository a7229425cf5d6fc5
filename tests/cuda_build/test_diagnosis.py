"""A number that is not finite is searched for while memory is full. Otherwise a NaN ends as "out of memory"."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cuda_build import null
from tests.cuda_build.front_door import Launch, Machine

pytestmark = [pytest.mark.runs, pytest.mark.timeout(600)]

UNKNOWN = "layer unknown: the search for it ran out of memory"


@pytest.mark.parametrize("size", ["base", "large"])
def test_the_search_needs_no_more_memory_than_a_step(size: str) -> None:
    """A compiled microbatch may fill the GPU; the search computes it eagerly, forward and then backward too."""
    found = null.run("diagnosis", size, NULL_DEVICE_TRUE="1")
    assert found["search"] <= found["step"], found


@pytest.fixture
def machine(tmp_path: Path, tiny_data: Path) -> Machine:
    """Return two GPUs. When the file `when` appears, rank 1 reads a NaN, and another program takes its GPU's memory."""
    settings = {"NULL_DEVICE_TRUE": "1", "NULL_FAULT": "1:search", "NULL_FAULT_WHEN": str(tmp_path / "when")}
    return Machine(tmp_path, tiny_data, gpus=2, settings=settings)


def words(machine: Machine, *overrides: str) -> list[str]:
    return [
        # 8,192 tokens a microbatch: its tensors must not fit into blocks that torch has cached
        *machine.words("run", "phases.long=null", "phases.short.batch_rows=256", "phases.short.batch_warmup=null",
                       "phases.short.microbatch_tokens=8192", "phases.short.tokens=400_000", "data.validation=null",
                       "checkpoint.interval_steps=1", *overrides),
        "--ranks", "2",
    ]  # fmt: skip


def faults(machine: Machine) -> list[dict[str, Any]]:
    file = machine.folder / "runs/run/faults.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def begin_fault(machine: Machine, launch: Launch) -> None:
    """Wait for steps and a checkpoint, then trigger the fault."""
    saved = machine.folder / "runs/run/checkpoints"
    launch.until(lambda: len(machine.steps("run")) >= 3 and any(saved.glob("step-*[1-9]")), 300)
    (machine.folder / "when").touch()


def require_fault(machine: Machine, action: str) -> dict[str, Any]:
    (fault,) = faults(machine)
    assert (fault["fault"], fault["action"]) == ("non_finite", action)
    assert {each["rank"] for each in fault["microbatches"]} == {1}
    assert all(each["place"].startswith(UNKNOWN) for each in fault["microbatches"])
    return fault


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_search_without_memory_stops_the_run_as_a_nan_and_halves_no_microbatch(
    machine: Machine, strategy: str
) -> None:
    """The microbatch is open and no checkpoint contains the phase: running out in a step would halve it."""
    more = (f"distributed.strategy={strategy}", "phases.short.microbatch_tokens=null", "checkpoint.interval_steps=1000")
    with machine.launched(*words(machine, "stability.non_finite=stop", *more)) as launch:
        launch.until(lambda: len(machine.steps("run")) >= 3, 300)
        (machine.folder / "when").touch()
        code, output = launch.end(120)
    assert code == 70, output[-4000:]
    step = require_fault(machine, "stop")["step"]
    last = output.splitlines()[-1]
    assert "rank 1" in last and f"step {step}, tokens" in last and "not finite, loss nan" in last and UNKNOWN in last
    assert f"step {step} ran out of memory" not in output
    assert not (machine.folder / "runs/run/halved.json").exists()


def test_replicated_ranks_skip_the_step_together(machine: Machine) -> None:
    """The run continues. The next step also lacks memory, and reports that."""
    with machine.launched(*words(machine, "stability.non_finite=skip")) as launch:
        begin_fault(machine, launch)
        code, output = launch.end(120)
    step = require_fault(machine, "skip")["step"]
    assert code == 70 and f"step {step + 1} ran out of memory" in output.splitlines()[-1], output[-4000:]
    assert f"step {step}, tokens" in output and UNKNOWN in output


@pytest.mark.parametrize("action", ["skip", "roll_back"])
def test_sharded_ranks_start_again_and_do_as_was_decided(machine: Machine, action: str) -> None:
    """One rank has left the others in the middle of a layer. The next start skips the search."""
    with machine.launched(*words(machine, f"stability.non_finite={action}", "distributed.strategy=fsdp2")) as launch:
        begin_fault(machine, launch)
        launch.until(lambda: faults(machine), 120)
        (machine.folder / "when").unlink()  # the other program has ended
        code, output = launch.end(300)
    assert code == 0, output[-4000:]
    step = require_fault(machine, action)["step"]
    steps = [line["step"] for line in machine.steps("run")]
    assert sorted({*range(1, max(steps) + 1)} - {*steps}) == [step] and max(steps) > step + 1
    assert "all ranks start again from the last checkpoint" in output and machine.faults == []
