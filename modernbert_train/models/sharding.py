"""Units that FSDP2 gathers, and whole tensors for sharded parameters: each rank takes its share, nothing is sent."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from modernbert_train.models.encoder import OnEncoder


def sharded_units(model: OnEncoder) -> list[nn.Module]:
    """What FSDP2 gathers on its own: each layer. The rest (embeddings, tied decoder, heads) is one more unit, and stays
    whole from the forward to the backward pass; so does a layer that is passed several times, which would be gathered
    each time, and is in use all the while."""
    units = (pair for each in model.encoders for pair in zip(each.layers, each.config.unit_passes, strict=True))
    return [layer for layer, passes in units if passes == 1]


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


def held_rows(tensor: Tensor) -> tuple[int, int]:
    """Which rows of the whole tensor this rank holds: the first one, and how many; of a single number 0 and 1.

    FSDP2 gives each rank of a mesh's dimension as many rows as torch.chunk does: the first ones one more than the last.
    """
    first, rows = 0, tensor.shape[0] if tensor.ndim else 1
    if isinstance(tensor, DTensor):
        place = tensor.device_mesh.get_coordinate()
        assert place is not None
        for dim, placement in enumerate(tensor.placements):
            if placement.is_replicate():
                continue
            assert placement.is_shard(0), "FSDP2 shards rows"
            each = -(-rows // tensor.device_mesh.size(dim))
            skipped = min(rows, each * place[dim])
            first, rows = first + skipped, min(each, rows - skipped)
        assert tensor.to_local().shape[0] == rows, "rows are not shared as torch.chunk does"
    return first, rows


def holders(tensor: Tensor, num_ranks: int) -> list[int]:
    """The ranks that hold the same rows of a tensor as this one, itself among them, in order."""
    if not isinstance(tensor, DTensor):
        return list(range(num_ranks))
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    assert place is not None
    ranks = mesh.mesh
    for dim in reversed(range(mesh.ndim)):
        if tensor.placements[dim].is_shard():
            ranks = ranks.select(dim, place[dim])
    return sorted(ranks.flatten().tolist())


def with_rows(local: Tensor, target: DTensor) -> DTensor:
    """The sharded tensor whose rows on this rank are these: of the target's dtype, placement and first dimension.

    Args:
        local: this rank's rows, see `held_rows`; the later dimensions may be others than the target's.
        target: only its dtype, place and number of rows matter.
    """
    shape = torch.Size((target.shape[0], *local.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    local = local.to(device=target.to_local().device, dtype=target.dtype, copy=True)
    placed = DTensor.from_local(
        local, target.device_mesh, target.placements, run_check=False, shape=shape, stride=stride
    )
    assert isinstance(placed, DTensor)
    return placed
