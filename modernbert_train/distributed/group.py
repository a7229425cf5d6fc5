"""The group of processes that train together: joining it, this process's rank, and collectives on objects and sums.

Before the ranks have joined, and on a single one, the launcher's environment variables give this process's rank.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from modernbert_train.core.text import first_line
from modernbert_train.core.torch_internals import set_timeouts
from modernbert_train.distributed import heartbeat
from modernbert_train.distributed.fail_together import failing_together, holds_store
from modernbert_train.distributed.heartbeat import CONNECTING, GRACE_SECONDS, post_heartbeat
from modernbert_train.distributed.launched import (
    LEFT_OVER,
    STORE,
    check_launch_variables,
    from_launcher,
    speaks_for_all,
)
from modernbert_train.distributed.shared_gpu import claim_gpu
from modernbert_train.distributed.stop_signals import say, stoppable_in_c
from modernbert_train.distributed.store_probe import wait_for_store
from modernbert_train.errors import RunError, StoppedEarly

T = TypeVar("T")
# defaults of torch's NCCL settings. The watchdog leaves a CUDA error to the main thread, which reports it and ends the
# process without an abort, since an abort can hang unless the others abort too; it records which collectives the GPU
# has reached, see heartbeat.py; and it waits two minutes before it ends a process: by then a lost machine has been
# named
_OF_TORCH = {
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "TORCH_NCCL_ENABLE_TIMING": "1",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "30000",
}
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # device -> torch's names of the collective backends
STORE_PREFIX = "modernbert-train"  # prefix of the store keys of ranks and launchers
_MEET_SECONDS = 5.0  # interval of rendezvous while rank 0 works
_QUIET_SECONDS = 20.0  # before the first rank says that it waits for the others

# set by launchers for their ranks; Composer's Trainer requires all of them, even for a single process
_ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "0"}


def this_rank() -> int:
    """Return the rank of this process."""
    return dist.get_rank() if dist.is_initialized() else from_launcher("RANK", 0)


def num_ranks() -> int:
    """Return the number of ranks (world size)."""
    return dist.get_world_size() if dist.is_initialized() else from_launcher("WORLD_SIZE", 1)


def local_rank() -> int:
    """Return the rank of this process on its machine."""
    return from_launcher("LOCAL_RANK", 0)


def ranks_per_node() -> int:
    """Return the number of ranks on this machine."""
    return from_launcher("LOCAL_WORLD_SIZE", 1)


@contextmanager
def joined(device: torch.device, timeout_seconds: float) -> Iterator[None]:
    """Join the other ranks, if a launcher started any, and leave them in order; an error of one ends all.

    Sums of a step use the device's network (NCCL on GPUs). Objects are exchanged over gloo, from the CPU, so neither
    waits in the other's queue.

    Args:
        device: this rank's; on a GPU, the current one.
        timeout_seconds: longest wait for another rank.

    Raises:
        RunError: the others cannot be reached.
        ConfigError: another rank computes on the same GPU, and sharing was not configured.
    """
    if not dist.is_initialized():
        check_launch_variables()
    with stoppable_in_c(), _saying_that_it_waits():
        store = None if dist.is_initialized() or num_ranks() == 1 else _meet(timeout_seconds)
    missing = {name: value for name, value in _ALONE.items() if name not in os.environ}
    os.environ.update(missing)
    failed = True
    try:
        with failing_together(timeout_seconds, store):
            if not dist.is_initialized():
                if store is not None and device.type == "cuda":
                    gpu = str(torch.cuda.get_device_properties(device).uuid)
                    claim_gpu(store, this_rank(), gpu, torch.cuda.nccl.version)
                    for name, value in _OF_TORCH.items():
                        os.environ.setdefault(name, value)
                post_heartbeat(CONNECTING)
                with stoppable_in_c(), _saying_that_it_waits():
                    dist.init_process_group(
                        BACKENDS[device.type],
                        store=dist.HashStore() if store is None else store,  # type: ignore[attr-defined]
                        rank=this_rank(),
                        world_size=num_ranks(),
                        timeout=timedelta(seconds=timeout_seconds + GRACE_SECONDS),
                        # NCCL connects now, while its errors can still be reported
                        device_id=device if store is not None and device.type == "cuda" else None,
                    )
                post_heartbeat("the first exchange of all ranks")
            yield
        failed = False
    except StoppedEarly:
        failed = False
        raise
    finally:
        heartbeat.set_timeout(0.0)
        # on success wait for the others; after a failure they are being ended
        if dist.is_initialized() and not (failed and num_ranks() > 1):
            dist.destroy_process_group()
        for name in missing:
            os.environ.pop(name, None)


def set_timeout(seconds: float, timeout_seconds: float) -> None:
    """Set how long a rank may keep the others waiting from now on; a collective call.

    Args:
        seconds: the new limit, if it is longer than the timeout.
        timeout_seconds: of `joined`.
    """
    heartbeat.set_timeout(seconds)
    if num_ranks() > 1:
        set_timeouts(max(seconds, timeout_seconds) + GRACE_SECONDS)


@contextmanager
def _saying_that_it_waits() -> Iterator[None]:
    """Context in which the first rank says, after some seconds, that it waits for the others."""
    where = os.environ.get(STORE) or f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    line = f"WORLD_SIZE={num_ranks()}: waiting at {where} for the other ranks. If no launcher starts them: {LEFT_OVER}"
    timer = threading.Timer(_QUIET_SECONDS, say, [line])
    timer.daemon = True
    if num_ranks() > 1 and speaks_for_all():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _meet(timeout_seconds: float) -> Any:
    """Return the rendezvous store, which ranks use before they join the group.

    Raises:
        RunError: it is unreachable in time, because its holder is missing.
    """
    if STORE in os.environ:  # not the store of torch's agent, which ends before all launchers have exchanged results
        os.environ["MASTER_ADDR"], _, os.environ["MASTER_PORT"] = os.environ[STORE].rpartition(":")
    host, port = os.environ["MASTER_ADDR"].strip("[]"), int(os.environ["MASTER_PORT"])
    is_holder = holds_store(this_rank())
    try:
        if not is_holder:
            wait_for_store(host, port, timeout_seconds, tell=lambda line: None)
        # missing from torch's type stubs
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            is_master=is_holder,
            multi_tenant=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_seconds + GRACE_SECONDS),
        )
    except (TimeoutError, dist.DistError) as error:
        holder = "rank 0 is gone or never came" if holds_store(0) else "the launcher that holds it is gone"
        here = f"MASTER_PORT={port} may be taken" if is_holder else f"{holder}, or the network to it is lost"
        raise RunError(
            f"rank {this_rank()} on {socket.gethostname()} cannot come to {host}:{port}, where the ranks "
            f"meet: {here} ({first_line(error)}). Look at the output of the others; then start the same command again."
        ) from error
    return dist.PrefixStore(STORE_PREFIX, store)  # type: ignore[attr-defined]


def on_rank_zero(do: Callable[[], T]) -> T:
    """Call a function on rank 0 only; every rank gets its result, or its error as RunError."""
    answer: list[Any] = [None]
    if this_rank() == 0:
        try:
            answer = [do()]
        except RunError as error:
            answer = [error]
    if num_ranks() > 1:
        post_heartbeat("an answer of rank 0")
        dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], RunError):
        raise answer[0]
    return answer[0]


def on_rank_zero_slowly(do: Callable[[], T]) -> T:
    """Like `on_rank_zero`, for calls longer than the timeout: the ranks exchange heartbeats while rank 0 works."""
    done: Future[T] = Future()
    if this_rank() == 0:

        def work() -> None:
            try:
                done.set_result(do())
            except BaseException as error:  # on_rank_zero raises it on all ranks
                done.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
    while not on_rank_zero(lambda: bool(wait([done], _MEET_SECONDS).done)):
        pass
    return on_rank_zero(done.result)


def gather_from_all(value: T) -> list[T]:
    """Return the values of all ranks, ordered by rank, on every rank."""
    values: list[Any] = [value] * num_ranks()
    if num_ranks() > 1:
        post_heartbeat("an exchange of all ranks")
        dist.all_gather_object(values, value)
    return values


def sum_over_ranks(values: Tensor) -> None:
    """Replace values by their sums over all ranks."""
    if num_ranks() > 1:
        post_heartbeat("a sum over all ranks")
        dist.all_reduce(values)


def sums_over_ranks(of_device: Sequence[Tensor], of_host: Sequence[float]) -> list[float]:
    """Sum over all ranks in one all-reduce, which syncs with the device.

    Args:
        of_device: scalars, fp64, on the model's device; at least one.
        of_host: numbers on the host; copied to the device together.

    Returns:
        The sums, in the order of the arguments.
    """
    split = len(of_device)
    values = of_device[0].new_empty(split + len(of_host))
    torch.stack([*of_device], out=values[:split])
    values[split:].copy_(torch.tensor(of_host, dtype=values.dtype), non_blocking=True)
    if num_ranks() > 1:
        post_heartbeat("the sums of a step")
        dist.all_reduce(values)
    sums: list[float] = values.tolist()
    return sums


def rows_of_all(rows_ND: Tensor, about: T) -> tuple[Tensor, list[T], slice]:
    """Gather the rows of every rank, ordered by rank, on every rank.

    Args:
        rows_ND: of this rank, on its device; N may differ between ranks.
        about: host data about them.

    Returns:
        All rows, each rank's `about`, and the slice of this rank's rows.
    """
    by_rank = gather_from_all((len(rows_ND), about))
    counts, values = [count for count, _ in by_rank], [each for _, each in by_rank]
    first = sum(counts[: this_rank()])
    own = slice(first, first + len(rows_ND))
    if num_ranks() == 1:
        return rows_ND, values, own
    post_heartbeat("the rows of all ranks")
    padded = rows_ND.new_zeros(max(counts), *rows_ND.shape[1:])
    padded[: len(rows_ND)] = rows_ND
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded)
    return torch.cat([rows[:count] for rows, count in zip(gathered, counts, strict=True)]), values, own


def wait_for_all() -> None:
    """Wait until every rank has called this."""
    if num_ranks() > 1:
        post_heartbeat("a meeting of all ranks")
        dist.all_reduce(torch.zeros(1))  # on the CPU; a barrier would queue behind all work of the GPUs
