"""Copy a number from the device without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


class Reading:
    """A scalar that is copied to the host asynchronously, after all work already queued on the device.

    Args:
        number: one element, on any device; it may change afterwards.
    """

    def __init__(self, number: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        number = number.detach()
        self._number = torch.empty((), dtype=number.dtype, pin_memory=number.is_cuda).copy_(number, non_blocking=True)
        if number.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def is_here(self) -> bool:
        return self._copied is None or self._copied.query()

    def value(self) -> float:
        """Return the number; waits for its copy only, not for work queued later."""
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._number)
