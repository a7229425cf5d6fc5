"""Whole tensors for parameters that may be sharded: every rank takes its own share, and nothing is sent."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def like(tensor: Tensor, target: Tensor) -> Tensor:
    """A whole tensor placed and sharded as another is.

    Args:
        tensor: the same on every rank.
        target: on a device, or a DTensor on any mesh; only its shape, dtype and placement matter.

    Returns:
        The tensor on the target's device and in its dtype; of a DTensor each rank holds its own share.
    """
    tensor = tensor.to(device=target.device, dtype=target.dtype)
    if isinstance(target, DTensor):
        return distribute_tensor(tensor, target.device_mesh, target.placements, src_data_rank=None)
    return tensor
