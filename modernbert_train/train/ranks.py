"""Processes that train together: joining, and doing a thing once for all."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from composer.devices import Device, DeviceGPU
from composer.utils import dist, get_device

from modernbert_train.errors import RunError, StoppedEarly
from modernbert_train.rendezvous import wait_for_store
from modernbert_train.train.failures import failing_together, holds_store
from modernbert_train.train.heartbeat import GRACE_SECONDS

T = TypeVar("T")


def composer_device(device: torch.device) -> Device:
    """The device as Composer knows it, with fp32 meaning fp32: by itself Composer turns TF32 on, which has ten bits."""
    return DeviceGPU(allow_tf32=False) if device.type == "cuda" else get_device(device.type)


@contextmanager
def joined(device: torch.device, timeout_seconds: float) -> Iterator[None]:
    """Join the other ranks, if a launcher started any, and leave them in order; an error of one ends all.

    Raises:
        RunError: the others cannot be reached.
    """
    of_composer, waits = composer_device(device), timeout_seconds + GRACE_SECONDS
    if dist.get_world_size() == 1 or torch.distributed.is_initialized():
        dist.initialize_dist(of_composer, timeout=waits)
        store = None
    else:
        store = _meet(timeout_seconds)
    failed = True
    try:
        with failing_together(timeout_seconds, store):
            if store is not None:
                torch.distributed.init_process_group(
                    of_composer.dist_backend,
                    store=store,
                    rank=dist.get_global_rank(),
                    world_size=dist.get_world_size(),
                    timeout=timedelta(seconds=waits),
                )
            yield
        failed = False
    except StoppedEarly:
        failed = False
        raise
    finally:
        # to leave in order a rank waits for the others, and after a failure they are being ended
        if torch.distributed.is_initialized() and not (failed and dist.get_world_size() > 1):
            torch.distributed.destroy_process_group()


def _meet(timeout_seconds: float) -> Any:
    """The store where the ranks meet, before they do: from here on each knows of the others.

    Raises:
        RunError: it is not there in time, for want of whoever holds it.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_holder = holds_store(dist.get_global_rank())
    try:
        if not is_holder:
            wait_for_store(host, port, timeout_seconds, tell=lambda line: None)
        # torch's types forget it
        store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            is_master=is_holder,
            multi_tenant=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_seconds + GRACE_SECONDS),
        )
    except (TimeoutError, torch.distributed.DistError) as error:
        holder = "rank 0 is gone or never came" if holds_store(0) else "the launcher that holds it is gone"
        here = f"MASTER_PORT={port} may be taken" if is_holder else f"{holder}, or the network to it is lost"
        first = (str(error).splitlines() or [""])[0]
        raise RunError(
            f"rank {dist.get_global_rank()} on {socket.gethostname()} cannot come to {host}:{port}, where the ranks "
            f"meet: {here} ({first}). Look at the output of the others; then start the same command again."
        ) from error
    return torch.distributed.PrefixStore("modernbert-train", store)  # type: ignore[attr-defined]


def on_rank_zero(do: Callable[[], T]) -> T:
    """Do something on rank 0 alone; every rank gets its result, or the RunError it raised."""
    answer: list[Any] = [None]
    if dist.get_global_rank() == 0:
        try:
            answer = [do()]
        except RunError as error:
            answer = [error]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], RunError):
        raise answer[0]
    return answer[0]
