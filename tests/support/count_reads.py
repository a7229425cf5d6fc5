"""Count how often the host reads a tensor."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class CountReads(TorchDispatchMode):
    """Counts reads of a tensor's value by the host, each of which would wait for the device."""

    reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))
