"""Processes that train together: joining, which of them this is, and doing a thing once for all.

Before the ranks have joined, and on a single one, the environment that a launcher sets says which rank this is.
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
from modernbert_train.distributed.heartbeat import CONNECTING, GRACE_SECONDS, passed
from modernbert_train.distributed.launched import STORE
from modernbert_train.distributed.rendezvous import wait_for_store
from modernbert_train.distributed.shared_gpu import claim_gpu
from modernbert_train.errors import RunError, StoppedEarly

T = TypeVar("T")
# of torch's NCCL, unless they are given. Its watchdog leaves a CUDA error to the main thread, which can tell it, and
# ends the process without an abort, which can hang where the others do not abort too; it notes which collectives the
# GPU has come to, see heartbeat.py; and it waits two minutes before it ends a process: a lost machine is named by then
_OF_TORCH = {
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "TORCH_NCCL_ENABLE_TIMING": "1",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "30000",
}
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # device -> torch's names of what carries collectives
STORE_PREFIX = "modernbert-train"  # before the keys of what the ranks tell each other, the launchers too
_MEET_SECONDS = 5.0  # between two meetings while rank 0 is at work

# what a launcher tells its ranks; Composer's Trainer asks for all of them, also of a process that is alone
_ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "0"}


def this_rank() -> int:
    """Number of this process among all."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def num_ranks() -> int:
    """Processes that train together."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Number of this process among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def ranks_per_node() -> int:
    """Processes of this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@contextmanager
def joined(device: torch.device, timeout_seconds: float) -> Iterator[None]:
    """Join the other ranks, if a launcher started any, and leave them in order; an error of one ends all.

    What a step sums goes over the network of the device, NCCL's on GPUs. What ranks tell each other as objects goes
    over gloo, from the CPU: neither waits in the other's queue.

    Args:
        device: this rank's own, and on a GPU the current one.
        timeout_seconds: longest wait for another rank.

    Raises:
        RunError: the others cannot be reached.
        ConfigError: another rank computes on the same GPU, and nobody asked for that.
    """
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
                passed(CONNECTING)
                dist.init_process_group(
                    BACKENDS[device.type],
                    store=dist.HashStore() if store is None else store,  # type: ignore[attr-defined]
                    rank=this_rank(),
                    world_size=num_ranks(),
                    timeout=timedelta(seconds=timeout_seconds + GRACE_SECONDS),
                    # NCCL connects now, where an error of it can still be told
                    device_id=device if store is not None and device.type == "cuda" else None,
                )
                passed("the first exchange of all ranks")
            yield
        failed = False
    except StoppedEarly:
        failed = False
        raise
    finally:
        heartbeat.allow(0.0)
        # to leave in order a rank waits for the others, and after a failure they are being ended
        if dist.is_initialized() and not (failed and num_ranks() > 1):
            dist.destroy_process_group()
        for name in missing:
            os.environ.pop(name, None)


def allow(seconds: float, timeout_seconds: float) -> None:
    """From here on a rank may keep the others waiting for longer, or as long as before; all ranks call it.

    Args:
        seconds: so long, if that is longer than the timeout.
        timeout_seconds: of `joined`.
    """
    heartbeat.allow(seconds)
    if num_ranks() > 1:
        set_timeouts(max(seconds, timeout_seconds) + GRACE_SECONDS)


def _meet(timeout_seconds: float) -> Any:
    """The store where the ranks meet, before they do: from here on each knows of the others.

    Raises:
        RunError: it is not there in time, for want of whoever holds it.
    """
    if STORE in os.environ:  # torch's agent has one more, which ends before the launchers have told each other all
        os.environ["MASTER_ADDR"], _, os.environ["MASTER_PORT"] = os.environ[STORE].rpartition(":")
    host, port = os.environ["MASTER_ADDR"].strip("[]"), int(os.environ["MASTER_PORT"])
    is_holder = holds_store(this_rank())
    try:
        if not is_holder:
            wait_for_store(host, port, timeout_seconds, tell=lambda line: None)
        # torch's types forget it
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
    """Do something on rank 0 alone; every rank gets its result, or the RunError it raised."""
    answer: list[Any] = [None]
    if this_rank() == 0:
        try:
            answer = [do()]
        except RunError as error:
            answer = [error]
    if num_ranks() > 1:
        passed("an answer of rank 0")
        dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], RunError):
        raise answer[0]
    return answer[0]


def on_rank_zero_slowly(do: Callable[[], T]) -> T:
    """As `on_rank_zero`, for what may take longer than the ranks wait for each other: they meet again and again."""
    done: Future[T] = Future()
    if this_rank() == 0:

        def work() -> None:
            try:
                done.set_result(do())
            except BaseException as error:  # the ranks wait for it, and on_rank_zero raises it
                done.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
    while not on_rank_zero(lambda: bool(wait([done], _MEET_SECONDS).done)):
        pass
    return on_rank_zero(done.result)


def gather_from_all(value: T) -> list[T]:
    """The value of every rank, by rank, on every rank."""
    found: list[Any] = [value] * num_ranks()
    if num_ranks() > 1:
        passed("an exchange of all ranks")
        dist.all_gather_object(found, value)
    return found


def sum_over_ranks(values: Tensor) -> None:
    """Replace values by their sums over all ranks."""
    if num_ranks() > 1:
        passed("a sum over all ranks")
        dist.all_reduce(values)


def sums_over_ranks(of_device: Sequence[Tensor], of_host: Sequence[float]) -> list[float]:
    """Sums over all ranks, in one all-reduce. The host waits for the device.

    Args:
        of_device: scalars, fp64, where the model is; at least one.
        of_host: numbers that the host knows; they go to the device in one copy.

    Returns:
        The sums, in the order of the arguments.
    """
    split = len(of_device)
    values = of_device[0].new_empty(split + len(of_host))
    torch.stack([*of_device], out=values[:split])
    values[split:].copy_(torch.tensor(of_host, dtype=values.dtype), non_blocking=True)
    if num_ranks() > 1:
        passed("the sums of a step")
        dist.all_reduce(values)
    sums: list[float] = values.tolist()
    return sums


def rows_of_all(rows_ND: Tensor, about: T) -> tuple[Tensor, list[T], slice]:
    """Rows of every rank, by rank, on every rank.

    Args:
        rows_ND: of this rank, on its device; as many as there are.
        about: what is to be known of them, on the host.

    Returns:
        All rows, what is known of each rank's, and where this rank's stand.
    """
    told = gather_from_all((len(rows_ND), about))
    counts, known = [count for count, _ in told], [each for _, each in told]
    first = sum(counts[: this_rank()])
    own = slice(first, first + len(rows_ND))
    if num_ranks() == 1:
        return rows_ND, known, own
    passed("the rows of all ranks")
    padded = rows_ND.new_zeros(max(counts), *rows_ND.shape[1:])
    padded[: len(rows_ND)] = rows_ND
    found = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(found, padded)
    return torch.cat([rows[:count] for rows, count in zip(found, counts, strict=True)]), known, own


def wait_for_all() -> None:
    """Until every rank has come here."""
    if num_ranks() > 1:
        passed("a meeting of all ranks")
        dist.all_reduce(torch.zeros(1))  # over the CPU; a barrier would be one of the GPUs, behind all that they have
