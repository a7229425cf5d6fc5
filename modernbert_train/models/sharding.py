"""The units that FSDP2 gathers, and full tensors for sharded parameters, without communication."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from modernbert_train.models.encoder import OnEncoder


def sharded_units(model: OnEncoder) -> list[nn.Module]:
    """Return the layers that FSDP2 gathers one by one.

    The rest (embeddings, tied decoder, heads) is one more unit and stays gathered from the forward to the backward
    pass. So does a layer that several passes share: it would be gathered again for each pass.
    """
    units = (pair for each in model.encoders for pair in zip(each.layers, each.config.unit_passes, strict=True))
    return [layer for layer, passes in units if passes == 1]


def like(tensor: Tensor, target: Tensor) -> Tensor:
    """Return a full tensor, placed and sharded like another.

    Args:
        tensor: the same on every rank.
        target: on a device, or a DTensor on any mesh; only its shape, dtype and placement matter.

    Returns:
        The tensor on the target's device and in its dtype; for a DTensor, each rank holds its own shard.
    """
    tensor = tensor.to(device=target.device, dtype=target.dtype)
    if isinstance(target, DTensor):
        return distribute_tensor(tensor, target.device_mesh, target.placements, src_data_rank=None)
    return tensor


def held_rows(tensor: Tensor) -> tuple[int, int]:
    """Return the first row and the number of rows of the full tensor on this rank; for a scalar 0 and 1.

    FSDP2 splits rows as torch.chunk does: the first ranks may hold one more row than the last.
    """
    first, rows = 0, tensor.shape[0] if tensor.ndim else 1
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        assert coordinate is not None
        for dim, placement in enumerate(tensor.placements):
            if placement.is_replicate():
                continue
            assert placement.is_shard(0), "FSDP2 shards rows"
            each = -(-rows // tensor.device_mesh.size(dim))
            skipped = min(rows, each * coordinate[dim])
            first, rows = first + skipped, min(each, rows - skipped)
        assert tensor.to_local().shape[0] == rows, "rows are not split as torch.chunk does"
    return first, rows


def holders(tensor: Tensor, num_ranks: int) -> list[int]:
    """Return the ranks that hold the same rows of a tensor as this one, itself included, in order."""
    if not isinstance(tensor, DTensor):
        return list(range(num_ranks))
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    ranks = mesh.mesh
    for dim in reversed(range(mesh.ndim)):
        if tensor.placements[dim].is_shard():
            ranks = ranks.select(dim, coordinate[dim])
    return sorted(ranks.flatten().tolist())


def with_rows(local: Tensor, target: DTensor) -> DTensor:
    """Return a DTensor with these rows on this rank and the target's dtype, placement and first dimension.

    Args:
        local: this rank's rows, see `held_rows`; later dimensions may differ from the target's.
        target: only its dtype, placement and number of rows matter.
    """
    shape = torch.Size((target.shape[0], *local.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    local = local.to(device=target.to_local().device, dtype=target.dtype, copy=True)
    placed = DTensor.from_local(
        local, target.device_mesh, target.placements, run_check=False, shape=shape, stride=stride
    )
    assert isinstance(placed, DTensor)
    return placed
