"""An NCCL error is a network error only if NCCL reports one, or a user examines cables for a full /dev/shm.

And a machine is blamed for an error only if it may have caused it: a scheduler restarts the job without it.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from modernbert_train.distributed.fail_together import ERROR, _is_between_ranks, failing_together
from modernbert_train.distributed.launched import BLAMED
from modernbert_train.errors import ConfigError, DataError, OutOfMemory, RunError, UnstableRun

_IN = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94"
_SYSTEM = (
    f"{_IN}, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.28.9\nncclSystemError: "
    "System call (e.g. socket, malloc) or external library call failed or device error. \nLast error:\n"
)
OWN = {
    "duplicate": f"{_IN}, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.28.9\nncclInvalidUsage: "
    "This usually reflects invalid usage of NCCL library.\nLast error:\n"
    "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 3b000",
    "memory": f"{_IN}, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.28.9\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
    "shared memory": f"{_SYSTEM}Error while creating shared memory segment /dev/shm/nccl-AbCdEf (size 33030528), "
    "error: No space left on device (28)",
    "locked memory": f"{_SYSTEM}Call to ibv_reg_mr failed with error Cannot allocate memory",
}
NETWORK = {
    "remote": f"{_IN}, remote process exited or there was a network error, NCCL version 2.28.9\nncclRemoteError: A "
    "call failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\n"
    "socketProgressOpt: Call to recv from 10.1.0.7<43211> failed : Connection reset by peer",
    "route": f"{_SYSTEM}socketPollConnect: connect to 10.1.0.7<43211> returned No route to host",
    "infiniband": f"{_SYSTEM}NET/IB: Got completion from peer 10.1.0.7<43211> with status=12 opcode=0 len=0",
}


LOST = [
    *map(dist.DistBackendError, NETWORK.values()),
    dist.DistNetworkError("failed to recv, got 0 bytes"),
    RuntimeError("[enforce fail at gloo/transport/tcp/pair.cc] Connection closed by peer"),
]


@pytest.mark.parametrize(
    ("error", "between"),
    [*((dist.DistBackendError(text), False) for text in OWN.values()), *((error, True) for error in LOST)],
    ids=lambda value: str(value)[-28:],
)
def test_only_what_is_of_the_network_is_taken_for_it(error: Exception, between: bool) -> None:
    assert _is_between_ranks(error) == between


def told(error: Exception, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the report that other ranks and all launchers get of an error that leaves a rank's training."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    with pytest.raises(type(error)), failing_together(store=store):
        raise error
    entry: dict[str, Any] = json.loads(store.get(ERROR))
    return entry


ACCELERATOR = "CUDA error: {}\nCUDA kernel errors might be asynchronously reported at some other API call."


@pytest.mark.runs
@pytest.mark.parametrize(
    "error",
    [
        TypeError("unsupported operand"),
        UnstableRun("step 7: not finite, loss nan"),
        OutOfMemory("step 7 ran out of memory"),
        DataError("a shard is damaged"),
        ConfigError("two ranks compute on the same GPU"),
        torch.AcceleratorError(ACCELERATOR.format("device-side assert triggered")),
        torch.AcceleratorError(ACCELERATOR.format("out of memory")),
        dist.DistBackendError(OWN["duplicate"]),
        dist.DistBackendError("NCCL error: the communicator was aborted on rank 1"),
    ],
    ids=lambda error: str(error)[:28],
)
def test_a_mistake_blames_no_machine(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes on every machine. Each new start would leave out one more that is healthy."""
    entry = told(error, monkeypatch)
    assert entry["rank"] == 0 and not entry["blames"]


@pytest.mark.runs
@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError(ACCELERATOR.format("uncorrectable ECC error encountered")),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
        dist.DistBackendError(OWN["shared memory"]),
    ],
    ids=lambda error: str(error)[:28],
)
def test_a_fault_of_a_gpu_or_of_its_machine_blames_it(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also an error of a single rank, without a launcher that would inform the job."""
    assert told(error, monkeypatch)["blames"]
    monkeypatch.setenv(BLAMED, str(tmp_path / "blamed"))
    with pytest.raises(TypeError), failing_together():
        raise TypeError("a bug")
    assert not (tmp_path / "blamed").exists()
    with pytest.raises(type(error)), failing_together():
        raise error
    assert (tmp_path / "blamed").read_text() == f"{socket.gethostname()}\n"


@pytest.mark.runs
def test_hardware_that_is_found_by_all_ranks_blames_its_own_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """All raise it, and the first to report it is innocent."""
    error = RunError("the copies of the weights differ between ranks")
    error.at_fault = (3, "node-7")
    entry = told(error, monkeypatch)
    assert (entry["rank"], entry["host"], entry["blames"]) == (3, "node-7", True)
