"""An error of NCCL's is of the network only where NCCL says so. Else someone looks at cables for a full /dev/shm."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from modernbert_train.ranks.fail_together import _is_between_ranks

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


@pytest.mark.parametrize("kind", OWN)
def test_what_is_of_this_machine_is_not_the_network(kind: str) -> None:
    assert not _is_between_ranks(dist.DistBackendError(OWN[kind]))


@pytest.mark.parametrize("kind", NETWORK)
def test_what_is_of_the_network_is(kind: str) -> None:
    assert _is_between_ranks(dist.DistBackendError(NETWORK[kind]))


def test_gloo_and_the_store_are_of_the_network() -> None:
    assert _is_between_ranks(RuntimeError("[enforce fail at gloo/transport/tcp/pair.cc] Connection closed by peer"))
    assert _is_between_ranks(dist.DistNetworkError("failed to recv, got 0 bytes"))
