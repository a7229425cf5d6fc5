"""A run on GPUs with all settings left open: its settings, and its reaction to too little memory.

If this breaks, a run trains at half of its GPUs' speed, or ends out of memory although half a microbatch would fit.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from modernbert_train.config.load import load_run
from modernbert_train.config.schema import RunConfig
from modernbert_train.plan.speed_settings import RunGpus, on_gpu
from tests.cuda_build.front_door import Machine, planted_tree

pytestmark = [pytest.mark.runs, pytest.mark.timeout(1800)]

SETTINGS = "modernbert_train/plan/speed_settings.py"
# a step of 256 rows of 64 tokens on each of two ranks; three steps
NOTHING_SET = (
    *("compute.compile=null", "optim.fused=null", "phases.short.microbatch_tokens=null", "phases.long=null"),
    *("phases.short.batch_warmup=null", "phases.short.batch_rows=512", "phases.short.tokens=90000"),
    *("data.validation=null", "checkpoint.interval_steps=null"),
)


def saved(machine: Machine) -> RunConfig:
    return load_run([machine.folder / "runs/run/config.yaml"])


def test_a_run_with_nothing_set_compiles_is_fused_and_takes_the_microbatch_of_plan(
    tmp_path: Path, tiny_data: Path
) -> None:
    """Two GPUs of 1.65 GiB; the steps are the same as with any other microbatch, and all rules are kept."""
    machine = Machine(tmp_path, tiny_data, gpus=2, settings={"NULL_DEVICE_GB": "1.65"})
    words = machine.words("run", *NOTHING_SET)
    code, said = machine.train(*words, "--ranks", "2", seconds=900)
    assert code == 0, said[-3000:]
    taken = saved(machine)
    assert taken.compute.compile is True and taken.optim.fused is True
    by_plan = on_gpu(load_run([Path(words[0])], words[1:]), RunGpus("", int(1.65 * (1 << 30)), 2), 2)
    rows = taken.phases["short"].microbatch_rows
    assert rows == by_plan.phases["short"].microbatch_rows and 1 < rows < 256
    assert ", compiled" in said and "microbatches that were left open take " in said and " off: " not in said
    assert [line["step"] for line in machine.steps("run")] == [1, 2, 3]
    assert machine.faults == []


def too_hopeful(folder: Path, tiny_data: Path, gpus: int) -> Machine:
    """Return GPUs of a quarter of a GiB, with `plan` patched to believe in four."""
    planted = (SETTINGS, "gpu.total_memory, ", "16 * gpu.total_memory, ")
    return Machine(folder, tiny_data, gpus, planted_tree(folder / "tree", planted), {"NULL_DEVICE_GB": "0.25"})


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_first_step_that_runs_out_of_memory_is_halved_and_resumes_so(
    tmp_path: Path, tiny_data: Path, ranks: int
) -> None:
    """All ranks start again automatically."""
    machine = too_hopeful(tmp_path, tiny_data, ranks)
    words = [*machine.words("run", *NOTHING_SET, "compute.compile=false"), "--ranks", str(ranks)]
    code, said = machine.train(*words, "--fresh", seconds=900)
    assert code == 0, said[-3000:]
    halvings = re.findall(r"microbatch_tokens=(\d+) does not fit .*: all ranks start again with (\d+)", said)
    halvings = [*dict.fromkeys(halvings)]
    assert halvings and all(int(half) * 2 == int(whole) for whole, half in halvings)
    left = int(halvings[-1][1])
    assert saved(machine).phases["short"].microbatch_tokens == left
    steps = [line["step"] for line in machine.steps("run")]
    assert steps == [*range(1, len(steps) + 1)]
    code, said = machine.train(*words, "phases.short.tokens=150000", seconds=900)
    assert code == 0 and "start again" not in said, said[-3000:]
    assert saved(machine).phases["short"].microbatch_tokens == left
    assert machine.steps("run")[-1]["step"] > steps[-1]
    assert machine.faults == []


def test_a_microbatch_that_is_given_is_not_halved(tmp_path: Path, tiny_data: Path) -> None:
    machine = too_hopeful(tmp_path, tiny_data, 1)
    given = ("phases.short.microbatch_tokens=32768", "compute.compile=false")
    code, said = machine.train(*machine.words("run", *NOTHING_SET, *given), seconds=400)
    assert code != 0 and "out of memory" in said.lower() and "start again" not in said


def test_what_is_beyond_the_gpu_is_refused_with_the_number_to_set(tmp_path: Path, tiny_data: Path) -> None:
    machine = Machine(tmp_path, tiny_data, gpus=1, settings={"NULL_DEVICE_GB": "8"})
    given = ("phases.short.batch_rows=16384", "phases.short.microbatch_tokens=1048576", "phases.short.tokens=9000000")
    code, said = machine.train(*machine.words("run", *NOTHING_SET, *given, width="base"), seconds=400)
    refusal = r"microbatch_tokens=1048576: needs [\d.]+ GB of a GPU by `plan`, and NVIDIA H100 .* has 8\.6 GB\. Set "
    found = re.search(refusal + r"phases\.short\.microbatch_tokens=(\d+)", said)
    assert code == 78 and found is not None, said[-3000:]
    assert not machine.steps("run")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_adamw_has_its_fused_form_and_resumes_from_one_that_had_not(
    tmp_path: Path, tiny_data: Path, strategy: str
) -> None:
    """torch keeps the step count where its fused kernel reads it: on the GPU, and on the CPU without it."""
    machine = Machine(tmp_path, tiny_data, gpus=2)
    adamw = ("optim={name: adamw, lr: 1e-3}", "compute.compile=false", f"distributed.strategy={strategy}")
    for count, form in enumerate(("optim.fused=false", "optim.fused=true", "optim.fused=false"), 1):
        words = machine.words("run", *NOTHING_SET, *adamw, f"phases.short.tokens={60000 * count}", form)
        code, said = machine.train(*words, "--ranks", "2", seconds=400)
        assert code == 0, said[-3000:]
        assert saved(machine).optim.fused is (form == "optim.fused=true")
    assert machine.faults == []


def test_a_gpu_that_is_too_old_says_so_once_and_what_it_costs(tmp_path: Path, tiny_data: Path) -> None:
    machine = Machine(tmp_path, tiny_data, gpus=1, settings={"NULL_DEVICE_CC": "75"})
    _, said = machine.train(*machine.words("run", *NOTHING_SET), seconds=400)
    off = r"compute\.compile and optim\.fused are off: .* has capability 7\.5, and 8\.0 is needed\. Without both"
    line = re.search(off + r" a run takes about 1\.8 times as long", said)
    assert line is not None and said.count(" are off: ") == 1, said[-3000:]
