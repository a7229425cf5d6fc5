"""Everything private of torch that we lean on outside of compilation, and nothing else.

INTERNALS lists each with the signature that this file was written for; a test compares it with what is installed.
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

# where it is -> its signature in torch 2.13; empty where it is an attribute of instances, looked for in the source
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
    """DDP with the same buckets in every step: a function of the model alone, so a restart cannot change a sum.

    By itself it reduces the first step of a process in one bucket and all later ones in buckets of the order in which
    gradients arose in that step. From three ranks on a sum over ranks depends on where in its bucket a number lies, so
    a resumed run would differ from one that was never stopped. Here the buckets get their order at once: the reverse
    of that in which modules are defined, nearly that of the backward pass. Where DDP looks for idle parameters it
    keeps the buckets that it begins with.
    """

    def __init__(self, module: nn.Module, **settings: Any) -> None:
        super().__init__(module, **settings)
        if not self.find_unused_parameters:
            self.reducer._push_all_rebuilt_params()
            rebuilt = self.reducer._rebuild_buckets()
            assert rebuilt, "or it would be done after the first step"

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()
        return (parameters, sparse) if self.find_unused_parameters else (parameters[::-1], sparse[::-1])


@contextmanager
def exit_barrier(replacement: Callable[[], None]) -> Iterator[None]:
    """Have torch's agent call this, where it would wait for the other machines once its own ranks have finished.

    It waits 300 s, in silence, and no setting changes that.
    """
    from torch.distributed.launcher import api  # of launchers only; a rank does not need it

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
    """Where the ranks of the default process group have met."""
    return dist.distributed_c10d._get_default_store()


def set_timeouts(seconds: float) -> None:
    """How long a collective of any group may wait, from the next one on, until torch ends it."""
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def gpu_collectives() -> tuple[int, int, int] | None:
    """Collectives of NCCL's, of all groups of this rank, as torch's watchdog has seen them; None without any.

    Returns:
        Those that the host has given to the GPU, those that the GPU has come to, those that have ended. The second
        needs TORCH_NCCL_ENABLE_TIMING. No call of CUDA's is made, so none can hang.
    """
    ask: Callable[..., bytes] | None = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    if ask is None:  # a torch for CPUs
        return None
    groups = json.loads(ask(includeCollectives=False, onlyActive=False)).get("pg_status", {}).values()
    if not groups:
        return None
    given, begun, ended = (
        sum(int(group[f"last_{what}_collective"]) for group in groups) for what in ("enqueued", "started", "completed")
    )
    return given, begun, ended


def worker_processes(batches: Any) -> list[Any]:
    """The processes of a DataLoader's iterator, in the order in which it gives out the work."""
    return list(batches._workers)


def watch_workers(batches: Any, watching: bool) -> None:
    """Have torch's signal handler look after a DataLoader's workers, or not. It refuses to be told the same twice."""
    if watching and not batches._worker_pids_set:
        torch._C._set_worker_pids(id(batches), tuple(worker.pid for worker in batches._workers))
    elif not watching and batches._worker_pids_set:
        torch._C._remove_worker_pids(id(batches))
    batches._worker_pids_set = watching


def abandon_workers(batches: Any) -> None:
    """Kill what is left of the workers; torch's orderly shutdown can wait for ever on a lock that a dead one held."""
    watch_workers(batches, False)
    for worker in batches._workers:
        worker.kill()
    batches._shutdown = True
