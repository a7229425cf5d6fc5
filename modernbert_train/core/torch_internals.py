"""All private APIs of torch's process groups, data loader and DDP that this package uses.

Private operators (`torch._foreach_...`, `torch.ops.aten._...`) and settings of compilation are in the files that use
them.

INTERNALS lists each with its expected signature; a test compares it with the installed torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# qualified name -> its signature in torch 2.13; empty for attributes of instances, which are looked up in the source
INTERNALS = {
    "torch.distributed.distributed_c10d._get_default_store": "() -> torch.distributed.distributed_c10d.Store",
    "torch.distributed.distributed_c10d._set_pg_timeout": (
        "(timeout: datetime.timedelta, group: torch.distributed.distributed_c10d.ProcessGroup | None = None) -> None"
    ),
    "torch.distributed.distributed_c10d._World.pg_map": "property",
    "torch.distributed.elastic.agent.server.api.SimpleElasticAgent._exit_barrier": "(self)",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._workers": "",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._worker_pids_set": "",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown": "",
    "torch._C._set_worker_pids": "builtin",
    "torch._C._remove_worker_pids": "builtin",
    "torch.nn.parallel.DistributedDataParallel._build_params_for_reducer": "(self)",
    "torch.distributed.Reducer._push_all_rebuilt_params": "builtin",
    "torch.distributed.Reducer._rebuild_buckets": "builtin",
}


class FixedBuckets(DistributedDataParallel):
    """DDP with the same buckets in every step, by the model alone, so that a restart does not change a sum.

    DDP itself reduces the first step of a process in one bucket, and later ones in buckets ordered by that step's
    gradients. From three ranks on, the rounding of a sum over ranks depends on a number's place in its bucket, so a
    resumed run would differ from an uninterrupted one. Here the buckets get their final order at once: the reverse of
    the modules' definition, nearly the backward pass's order. With a search for unused parameters DDP keeps its first
    buckets anyway.
    """

    def __init__(self, module: nn.Module, **settings: Any) -> None:
        super().__init__(module, **settings)
        if not self.find_unused_parameters:
            self.reducer._push_all_rebuilt_params()
            rebuilt = self.reducer._rebuild_buckets()
            assert rebuilt, "or it would happen after the first step"

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()
        return (parameters, sparse) if self.find_unused_parameters else (parameters[::-1], sparse[::-1])


@contextmanager
def exit_barrier(replacement: Callable[[], None]) -> Iterator[None]:
    """Let torch's agent call a replacement where it would wait for the other machines after its own ranks have ended.

    The agent waits 300 s without a message, and no setting changes that.
    """
    from torch.distributed.launcher import api  # needed in launchers only, not in ranks

    original = api.LocalElasticAgent

    class Agent(original):  # type: ignore[misc, valid-type]
        def _exit_barrier(self) -> None:
            replacement()

    api.LocalElasticAgent = Agent  # type: ignore[misc]
    try:
        yield
    finally:
        api.LocalElasticAgent = original  # type: ignore[misc]


def default_store() -> Any:
    """Return the rendezvous store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def set_timeouts(seconds: float) -> None:
    """Set how long a collective of any group may wait, from the next one on, before torch ends it."""
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def gpu_collectives() -> tuple[int, int, int] | None:
    """Return the counts of NCCL collectives of all groups of this rank, from torch's watchdog; None without NCCL.

    Returns:
        Collectives that the host has enqueued, that the GPU has started, and that have completed. The second needs
        TORCH_NCCL_ENABLE_TIMING. It makes no CUDA call, so it cannot hang.
    """
    ask: Callable[..., bytes] | None = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    if ask is None:  # a CPU build of torch
        return None
    groups = json.loads(ask(includeCollectives=False, onlyActive=False)).get("pg_status", {}).values()
    if not groups:
        return None
    enqueued, begun, ended = (
        sum(int(group[f"last_{state}_collective"]) for group in groups)
        for state in ("enqueued", "started", "completed")
    )
    return enqueued, begun, ended


def worker_processes(batches: Any) -> list[Any]:
    """Return the worker processes of a DataLoader's iterator, in the order in which it assigns work."""
    return list(batches._workers)


def watch_workers(batches: Any, watching: bool) -> None:
    """Let torch's signal handler watch a DataLoader's workers, or not. It refuses the same setting twice."""
    if watching and not batches._worker_pids_set:
        torch._C._set_worker_pids(id(batches), tuple(worker.pid for worker in batches._workers))
    elif not watching and batches._worker_pids_set:
        torch._C._remove_worker_pids(id(batches))
    batches._worker_pids_set = watching


def abandon_workers(batches: Any) -> None:
    """Kill the remaining workers; torch's orderly shutdown can block forever on a lock that a dead worker held."""
    watch_workers(batches, False)
    for worker in batches._workers:
        worker.kill()
    batches._shutdown = True
