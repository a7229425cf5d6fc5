"""Everything private of torch that we lean on outside of compilation, and nothing else.

INTERNALS lists each with the signature that this file was written for; a test compares it with what is installed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# where it is -> its signature in torch 2.13; empty where it is an attribute of instances, looked for in the source
INTERNALS = {
    "torch.distributed.distributed_c10d._get_default_store": "() -> torch.distributed.distributed_c10d.Store",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._workers": "",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._worker_pids_set": "",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown": "",
    "torch._C._set_worker_pids": "builtin",
    "torch._C._remove_worker_pids": "builtin",
}


def default_store() -> Any:
    """Where the ranks of the default process group have met."""
    return dist.distributed_c10d._get_default_store()


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
