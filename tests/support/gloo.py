"""Run a function on N real processes that communicate by gloo, from inside an ordinary test.

The parent holds the rendezvous store on a port the system picks, so two tests never race for one; results return
through pipes, so a failing rank reports at once while its peers still wait for it in a collective. Ranks are forks of a
process that has only imported their packages, see tests/support/forked.py.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from tests.support.forked import CONTEXT, outputs, print_to, settle

HOST = "127.0.0.1"


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 120) -> list[Any]:
    """Call fn(*args) on every rank of a new gloo process group.

    The ranks share nothing with this process, so `fn` must be a module-level function and `args` must pickle. They have
    one thread each, no GPU, a default process group, this process's environment, and the variables of torchrun and
    Composer's launcher (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR, MASTER_PORT).

    Args:
        timeout_seconds: for everything, the start of the processes included. Ranks that hang print their stacks.

    Returns:
        The return value of each rank; tensors are copies.

    Raises:
        RuntimeError: a rank raised or died; the message holds its traceback.
        TimeoutError: some ranks did not finish; names them.
    """
    deadline = time.monotonic() + timeout_seconds
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    processes = []
    pipes: dict[Connection, int] = {}
    results: dict[int, Any] = {}
    try:
        for rank in range(world_size):
            receiver, sender = CONTEXT.Pipe(duplex=False)
            task = pickle.dumps((fn, args))
            job = (rank, world_size, store.port, timeout_seconds, sender, dict(os.environ), outputs(), task)
            process = CONTEXT.Process(target=_run_rank, args=job)
            process.start()
            sender.close()  # the child holds the other copy; its death then shows as the end of the stream
            processes.append(process)
            pipes[receiver] = rank
        while pipes:
            ready = wait(list(pipes), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"ranks {sorted(pipes.values())} of {world_size} not done in {timeout_seconds} s")
            for receiver in [pipe for pipe in pipes if pipe in ready]:
                rank = pipes.pop(receiver)
                try:
                    succeeded, value = pickle.loads(receiver.recv_bytes())
                except EOFError:
                    processes[rank].join(10)
                    raise RuntimeError(f"rank {rank} died with exit code {processes[rank].exitcode}") from None
                if not succeeded:
                    raise RuntimeError(f"rank {rank} of {world_size} raised:\n{value}")
                results[rank] = value
    finally:
        if len(results) < world_size:
            for process in processes:
                process.kill()
        for process in processes:
            process.join()
    return [results[rank] for rank in range(world_size)]


def _run_rank(
    rank: int,
    world_size: int,
    port: int,
    timeout_seconds: float,
    pipe: Connection,
    environment: dict[str, str],
    streams: tuple[Connection, Connection],
    task: bytes,
) -> None:
    print_to(*streams)
    faulthandler.dump_traceback_later(0.9 * timeout_seconds)
    settle(environment)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        NODE_RANK="0",
        MASTER_ADDR=HOST,
        MASTER_PORT=str(port),
        CUDA_VISIBLE_DEVICES="",
    )
    torch.set_num_threads(1)
    try:
        fn, args = pickle.loads(task)
        timeout = timedelta(seconds=timeout_seconds)
        store = dist.TCPStore(HOST, port, is_master=False, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        dist.barrier()  # who leaves a group at once breaks the connections that others are still making
        answer = (True, fn(*args))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))
    faulthandler.cancel_dump_traceback_later()
