"""Assign a GPU to each rank, and let ranks share one if that is configured.

NCCL refuses two ranks on a GPU of one host. `NCCL_HOSTID` sets the host name of a rank, so ranks with different names
may share a GPU and communicate over the network; since NCCL 2.30 `NCCL_MULTI_RANK_GPU_ENABLE=1` allows it as well.
This makes it possible to test collectives on a single GPU.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from modernbert_train.errors import ConfigError

HOST_ID, ENABLE = "NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE"
SHARED = "shared"  # the value of HOST_ID recommended in messages and docs
ENABLED_FROM = (2, 30)  # first NCCL that reads ENABLE
_WORTH = (
    "That tests collectives, their order and types, saves and resumes; it does not measure speed or overlap, nor test "
    "NVLink and shared memory between GPUs."
)


def may_share(environment: Mapping[str, str]) -> bool:
    """Return True if the environment lets ranks share a GPU, whether or not NCCL can."""
    return bool(environment.get(HOST_ID)) or environment.get(ENABLE) == "1"


def gpu_of_rank(local_rank: int, gpus: int, environment: Mapping[str, str]) -> int:
    """Return the index of a rank's GPU among the visible ones; a launcher may show each rank only one.

    Raises:
        ConfigError: there are several GPUs, fewer than ranks, and sharing is not configured.
    """
    if gpus > 1 and local_rank >= gpus and not may_share(environment):
        raise ConfigError(
            f"LOCAL_RANK={local_rank}: this machine shows {gpus} GPUs, and every rank needs its own. Start "
            f"{gpus} ranks on it (`launch ... --ranks {gpus}`), or show it more with CUDA_VISIBLE_DEVICES. To try "
            f"more ranks than GPUs, set {HOST_ID}={SHARED}."
        )
    return local_rank % gpus if gpus > 1 else 0  # two ranks on one GPU are refused when they join


def claim_gpu(store: Any, rank: int, gpu: str, nccl_version: Callable[[], Sequence[Any]]) -> None:
    """Claim this rank's GPU. If another rank has claimed it, share it if that is configured, else refuse.

    Call it before NCCL connects: a rank that shares a GPU gets its own host name.

    Args:
        store: the rendezvous store.
        rank: of this process.
        gpu: the identifier of its GPU.
        nccl_version: returns NCCL's version, such as (2, 30, 7); called only if needed.

    Raises:
        ConfigError: another rank has claimed the same GPU and sharing is not configured, or this NCCL cannot share.
    """
    mine = f"rank {rank} on {socket.gethostname()}"
    first = store.compare_set(f"gpu/{gpu}", "", mine).decode()
    host_id = os.environ.get(HOST_ID)
    if host_id:
        # `shared` is the same on all machines, which must differ for NCCL: append the host name. Any other value is the
        # user's host name, as for containers of one machine, and is kept unless GPUs are shared.
        host = f"{host_id}-{socket.gethostname()}" if host_id == SHARED else host_id
        os.environ[HOST_ID] = host if first == mine else f"{host}-{rank}"
    if first == mine:
        return
    here = f"{mine} and {first} compute on the same GPU ({gpu})"
    if not may_share(os.environ):
        raise ConfigError(
            f"{here}, and every rank needs its own. Start as many ranks on each machine as it shows GPUs, and "
            "look at CUDA_VISIBLE_DEVICES: a launcher that shows each rank one GPU must show each another one. To "
            f"share a GPU all the same, for a trial of the collectives, set {HOST_ID}={SHARED}."
        )
    if not host_id and tuple(version := nccl_version())[:2] < ENABLED_FROM:
        installed = ".".join(map(str, version))
        raise ConfigError(
            f"{here}, and {ENABLE}=1 is read from NCCL {'.'.join(map(str, ENABLED_FROM))} on; this is {installed}. Set "
            f"{HOST_ID}={SHARED} instead, which every NCCL takes."
        )
    if store.compare_set("gpu-shared", "", mine).decode() == mine:
        print(f"warning: {here}, as configured. {_WORTH}", file=sys.stderr, flush=True)
