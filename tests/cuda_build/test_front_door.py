"""`launch/run.py` on several GPUs that compute nothing, in real processes that keep NCCL's rules.

If this breaks, runs on two or more GPUs do not start, or their ranks wait for each other for ever. Values sent by NCCL
are not simulated, except those from the host; see null_nccl.c.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cuda_build.front_door import Machine, journey, planted_tree
from tests.cuda_build.null import environment
from tests.support.paths import ROOT

pytestmark = [pytest.mark.runs, pytest.mark.timeout(1800)]

COMPILED, RECOMPUTED = "compute.compile=true", "compute.activation_checkpointing=true"
EAGER = "compute.compile=false"
FSDP2, HSDP = ("distributed.strategy=fsdp2",), ("distributed.strategy=hsdp", "distributed.shard_ranks=4")
ON_TWO = {
    "ddp eager base": (EAGER,),
    "ddp eager recomputed tiny": (EAGER, RECOMPUTED),
    "ddp compiled large": (COMPILED,),
    "ddp compiled recomputed fused base": (COMPILED, RECOMPUTED, "optim.fused=true"),
    "ddp compiled deterministic base": (COMPILED, "compute.deterministic=true"),
    "fsdp2 eager large": (EAGER, *FSDP2),
    "fsdp2 eager recomputed tiny": (EAGER, RECOMPUTED, *FSDP2),
    "fsdp2 eager muon tiny": (EAGER, "optim={name: muon, lr: 1e-3}", *FSDP2),
    "fsdp2 compiled base": (COMPILED, *FSDP2),
    "fsdp2 compiled recomputed fused tiny": (COMPILED, RECOMPUTED, "optim.fused=true", *FSDP2),
}
QUICK = pytest.mark.cuda_quick
# also in `.ci/run`: each strategy, eager and compiled
FIRST = ("ddp eager base", "ddp compiled recomputed fused base", "fsdp2 eager muon tiny", "fsdp2 compiled base")
ON_EIGHT = {
    "ddp eager base": (EAGER,),
    "ddp compiled tiny": (COMPILED,),
    "fsdp2 eager tiny": (EAGER, *FSDP2),
    "fsdp2 compiled recomputed tiny": (COMPILED, RECOMPUTED, *FSDP2),
    "hsdp eager base": (EAGER, *HSDP),
    "hsdp eager recomputed large": (EAGER, RECOMPUTED, *HSDP),
    "hsdp compiled tiny": (COMPILED, *HSDP),
    "hsdp compiled recomputed fused tiny": (COMPILED, RECOMPUTED, "optim.fused=true", *HSDP),
}
GROUP = "modernbert_train/distributed/group.py"
SHORT = ("phases.short.tokens=1600", "phases.long=null")
EIGHT_ROWS = ("phases.short.batch_rows=16", "phases.short.batch_warmup.start_rows=8", "phases.short.tokens=24000")
MORE_ROWS = (*EIGHT_ROWS, "phases.short.batch_warmup.step_rows=8", "phases.long.batch_rows=8")


@pytest.fixture
def two(tmp_path: Path, tiny_data: Path) -> Machine:
    return Machine(tmp_path, tiny_data, gpus=2)


@pytest.mark.parametrize("case", [pytest.param(case, marks=[QUICK] * (case in FIRST)) for case in ON_TWO])
def test_two_gpus_train_stop_and_resume(two: Machine, case: str) -> None:
    """Batch warmup, two phases, validation, checkpoints, a signal, a resume; all rules of CUDA and NCCL are kept."""
    said = journey(two, "run", 2, ON_TWO[case], case.split()[-1], seconds=400)
    assert two.faults == []
    assert "2 x NVIDIA H100" in said and "validation at" in said


@pytest.mark.parametrize("case", ON_EIGHT)
def test_eight_gpus_train_stop_and_resume(tmp_path: Path, tiny_data: Path, case: str) -> None:
    patient = {"NULL_NCCL_PATIENCE": "600"}  # eight ranks that compile on a few cores arrive minutes after each other
    machine = Machine(tmp_path, tiny_data, gpus=8, settings=patient)
    journey(machine, "run", 8, [*MORE_ROWS, *ON_EIGHT[case]], case.split()[-1], seconds=800)
    assert machine.faults == []


@QUICK
def test_two_ranks_on_one_gpu_are_refused_by_name(two: Machine) -> None:
    code, said = two.train(*two.words("run"), "--ranks", "2", seconds=200, visible="0,0")
    assert code == 78
    assert "compute on the same GPU" in said and "rank 0 on" in said and "rank 1 on" in said


@QUICK
def test_two_ranks_share_a_gpu_where_the_user_says_so(tmp_path: Path, tiny_data: Path) -> None:
    """To try the collectives: they train, with one warning."""
    machine = Machine(tmp_path, tiny_data, gpus=1, settings={"NCCL_HOSTID": "shared"})
    code, said = machine.train(*machine.words("run", *SHORT), "--ranks", "2", seconds=300)
    assert code == 0, said[-3000:]
    assert machine.faults == [] and said.count("compute on the same GPU") == 1 and "does not measure speed" in said


def test_the_switch_of_newer_nccl_shares_a_gpu_too(tmp_path: Path, tiny_data: Path) -> None:
    """NCCL 2.30 reads it; an older one would reject the second rank with its own message, so we check first."""
    reads_it = torch.cuda.nccl.version() >= (2, 30)
    machine = Machine(tmp_path, tiny_data, gpus=1, settings={"NCCL_MULTI_RANK_GPU_ENABLE": "1"})
    code, said = machine.train(*machine.words("run", *SHORT), "--ranks", "2", seconds=300)
    assert code == (0 if reads_it else 78), said[-3000:]
    assert machine.faults == [] and ("is read from NCCL 2.30 on" in said) == (not reads_it)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_each_rank_may_be_shown_one_gpu(two: Machine, strategy: str) -> None:
    """As Slurm does with --gpus-per-task=1: LOCAL_RANK counts up, and the only GPU that a rank sees is number 0."""
    words = ["train", *two.words("run", *SHORT, f"distributed.strategy={strategy}")]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(29_500 + os.getpid() % 1000)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "modernbert_train", *words],
            env=two.environment(str(rank)) | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=ROOT,
        )
        for rank in range(2)
    ]
    assert [rank.wait(300) for rank in ranks] == [0, 0]
    assert two.faults == []


@QUICK
def test_a_deterministic_run_says_so_before_what_it_governs(tmp_path: Path) -> None:
    """After cuBLAS has its workspace, NCCL its network and the compiler its first kernel, it would have no effect."""
    script = (
        "import os, torch\n"
        "from modernbert_train.distributed.compute import Compute\n"
        "from modernbert_train.config.schema import ComputeConfig\n"
        "compute = Compute.of(ComputeConfig(deterministic=True))\n"
        "print(torch.are_deterministic_algorithms_enabled(), torch._inductor.config.deterministic,\n"
        "      os.environ['CUBLAS_WORKSPACE_CONFIG'], os.environ['NCCL_NVLS_ENABLE'])\n"
        "a = torch.ones(64, 64, device=compute.device)\n"
        "print(torch.distributed.is_initialized(), (a @ a).shape)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | environment(), cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n")[0] == "True True :4096:8 0"


def test_a_node_that_cannot_be_reached_is_reported_by_the_rank_that_saw_it(two: Machine) -> None:
    """Within the timeout, with NCCL's own message and advice."""
    two.settings["NULL_NCCL_UNREACHABLE"] = "1"
    code, said = two.train(*two.words("run"), "--ranks", "2", seconds=200)
    assert code == 70
    assert "rank 1 on" in said and "No route to host" in said and "NCCL_SOCKET_IFNAME" in said


class TestBrokenRulesAreSeen:
    """Otherwise the runs above would prove nothing."""

    def test_a_rank_whose_current_device_is_another(self, tmp_path: Path, tiny_data: Path) -> None:
        """A former fault: the device is not set, and exchanges at the start use NCCL on the current one."""
        tree = planted_tree(
            tmp_path / "tree",
            (
                "modernbert_train/distributed/compute.py",
                "    torch.cuda.set_device(device)",
                "    torch.cuda.device_count()",
            ),
            (GROUP, 'device_id=device if store is not None and device.type == "cuda" else None', "device_id=None"),
            (GROUP, "cpu:gloo,cuda:nccl", "nccl"),
        )
        machine = Machine(tmp_path, tiny_data, gpus=2, root=tree)
        code, said = machine.train(*machine.words("run", *SHORT), "--ranks", "2", seconds=300)
        assert code != 0 and "Duplicate GPU detected" in said + "".join(machine.faults)

    def test_two_ranks_on_one_gpu_reach_nccl(self, tmp_path: Path, tiny_data: Path) -> None:
        line = "                    claim_gpu(store, this_rank(), gpu, torch.cuda.nccl.version)"
        tree = planted_tree(tmp_path / "tree", (GROUP, line, "                    pass"))
        machine = Machine(tmp_path, tiny_data, gpus=2, root=tree)
        code, said = machine.train(*machine.words("run"), "--ranks", "2", seconds=300, visible="0,0")
        assert code != 0 and "Duplicate GPU detected" in said + "".join(machine.faults)

    @QUICK
    def test_a_rank_that_skips_a_collective(self, tmp_path: Path, tiny_data: Path) -> None:
        """Its next call differs from the others', and both are named."""
        line = "    values[split:].copy_(torch.tensor(of_host, dtype=values.dtype), non_blocking=True)\n"
        skipped = line + "    if this_rank() == 1:\n        return [0.0] * len(values)\n"
        tree = planted_tree(tmp_path / "tree", (GROUP, line, skipped))
        machine = Machine(tmp_path, tiny_data, gpus=2, root=tree)
        code, _ = machine.train(*machine.words("run", "data.validation=null"), "--ranks", "2", seconds=300)
        assert code != 0
        assert any("is allReduce of" in fault and "on rank" in fault for fault in machine.faults), machine.faults

    def test_a_rank_that_never_comes_is_named(self, tmp_path: Path, tiny_data: Path) -> None:
        """By the device and by the product: that rank, within the timeout."""
        line = "    split = len(of_device)\n"
        stuck = line + "    import time\n    time.sleep(1e6 if this_rank() == 1 else 0)\n"
        tree = planted_tree(tmp_path / "tree", (GROUP, line, stuck))
        machine = Machine(tmp_path, tiny_data, gpus=2, root=tree, settings={"NULL_NCCL_PATIENCE": "5"})
        limits = ("distributed.timeout_seconds=40", "distributed.first_step_timeout_seconds=40")
        words = machine.words("run", "data.validation=null", *limits)
        code, said = machine.train(*words, "--ranks", "2", seconds=300)
        assert code == 124 and "hangs: " in said and "error: rank 1 on" in said, said[-3000:]
        assert any("waits in call" in fault and "for rank 1, which has not come to it" in fault
                   for fault in machine.faults), machine.faults  # fmt: skip
