"""Processes that train together: joining, and doing a thing once for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from composer.devices import Device, DeviceGPU
from composer.utils import dist, get_device

from modernbert_train.errors import RunError, StoppedEarly
from modernbert_train.train.failures import failing_together
from modernbert_train.train.heartbeat import GRACE_SECONDS

T = TypeVar("T")


def composer_device(device: torch.device) -> Device:
    """The device as Composer knows it, with fp32 meaning fp32: by itself Composer turns TF32 on, which has ten bits."""
    return DeviceGPU(allow_tf32=False) if device.type == "cuda" else get_device(device.type)


@contextmanager
def joined(device: torch.device, timeout_seconds: float) -> Iterator[None]:
    """Join the other ranks, if a launcher started any, and leave them in order; an error of one ends all."""
    dist.initialize_dist(composer_device(device), timeout=timeout_seconds + GRACE_SECONDS)
    failed = True
    try:
        with failing_together(timeout_seconds):
            yield
        failed = False
    except StoppedEarly:
        failed = False
        raise
    finally:
        # to leave in order a rank waits for the others, and after a failure they are being ended
        if torch.distributed.is_initialized() and not (failed and dist.get_world_size() > 1):
            torch.distributed.destroy_process_group()


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
