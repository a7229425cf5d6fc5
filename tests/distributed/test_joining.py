"""NCCL's settings before it connects. None can be changed afterwards, and each prevents a hang or a lost error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
import torch.distributed as dist

from modernbert_train.distributed import group
from modernbert_train.distributed.group import joined, sums_over_ranks
from modernbert_train.errors import StoppedEarly
from modernbert_train.models.compiler import set_up_compiler
from tests.support.paths import ROOT
from tests.support.waiting import catches, free_port, until

TOLD = {
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # else torch's watchdog ends the rank before it has reported its error
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # else it aborts, which can hang
    "TORCH_NCCL_ENABLE_TIMING": "1",  # else a hanging GPU cannot be found by its progress
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "30000",
}


@pytest.mark.runs
@pytest.mark.parametrize("given", [None, "1"])
def test_nccl_is_configured_before_it_connects_and_is_given_this_ranks_gpu(
    monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    seen: dict[str, Any] = {}

    def connect(backend: str, **named: Any) -> None:
        seen.update(named, backend=backend, environment=dict(os.environ))
        raise StoppedEarly("far enough")

    for name in TOLD:
        monkeypatch.setenv(name, "")  # so that the test's settings are undone with it
        del os.environ[name]
    if given is not None:
        monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", given)
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(group, "_meet", lambda seconds: dist.HashStore())  # type: ignore[attr-defined]
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device.index}"))
    monkeypatch.setattr(dist, "init_process_group", connect)
    with pytest.raises(StoppedEarly), joined(gpu, 300.0):
        pass
    told = TOLD | ({} if given is None else {"TORCH_NCCL_ASYNC_ERROR_HANDLING": given})
    assert {name: seen["environment"].get(name) for name in TOLD} == told, "what is given is kept"
    assert seen["device_id"] == gpu and seen["backend"] == "cpu:gloo,cuda:nccl"
    assert seen["timeout"].total_seconds() == 315, "a hang gets its name first"


WAITS = """
import torch
from modernbert_train.distributed import group
from modernbert_train.distributed.stop_signals import take_over
take_over()
group._QUIET_SECONDS = 0.2
with group.joined(torch.device("cpu"), 300.0):
    pass
"""


@pytest.mark.runs
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_that_waits_for_the_others_says_so_and_ends_at_the_first_signal(rank: str) -> None:
    """It waits in C++, where no Python handler runs: with a leftover WORLD_SIZE only kill -9 ended it, and no line said
    why nothing happened."""
    port = str(free_port())
    ranks = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}
    environment = os.environ | ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WAITS]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as waiting:
        try:
            if rank == "0":
                line = waiting.stderr.readline()
                assert f"WORLD_SIZE=2: waiting at 127.0.0.1:{port} for the other ranks" in line and "unset RANK" in line
            else:  # it is silent
                until(lambda: catches(waiting.pid, signal.SIGTERM))
                time.sleep(2)
            waiting.send_signal(signal.SIGTERM)
            assert waiting.wait(20) == 75
        finally:
            waiting.kill()


def test_compiled_layers_are_launched_without_the_gil_and_not_cut_at_ddps_buckets() -> None:
    """Inductor's static launcher holds it: in a full queue a rank then hears of no error, for half an hour."""
    with torch._inductor.config.patch(use_static_cuda_launcher=True), torch._dynamo.config.patch(optimize_ddp=True):
        set_up_compiler()
        assert torch._inductor.config.use_static_cuda_launcher is False
        assert torch._dynamo.config.optimize_ddp is False


def test_the_sums_of_a_step_are_kept_in_double_precision() -> None:
    """A step counts tokens beyond 2^24, where fp32 lacks odd numbers."""
    odd = 16_777_217.0
    assert sums_over_ranks([torch.tensor(odd, dtype=torch.float64)], [odd, 3.0]) == [odd, odd, 3.0]
