"""Processes that train together: joining, and doing a thing once for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from composer.devices import Device
from composer.utils import dist, get_device

from modernbert_train.errors import RunError

T = TypeVar("T")


def composer_device(device: torch.device) -> Device:
    """The device under Composer's name for it; it calls CUDA "gpu"."""
    return get_device("gpu" if device.type == "cuda" else device.type)


@contextmanager
def joined(device: torch.device, timeout_seconds: float) -> Iterator[None]:
    """Join the other ranks, if a launcher started any, and leave them in order."""
    dist.initialize_dist(composer_device(device), timeout=timeout_seconds)
    try:
        yield
    finally:
        if torch.distributed.is_initialized():
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
