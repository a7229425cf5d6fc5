"""StableAdamW's two halves as Triton kernels over all weights of a block: two launches, 40 bytes a weight.

As foreach operations the same step reads and writes some 140 bytes a weight and launches a few dozen kernels for each
group of tensors; the minimum is 36 bytes (see benchmarks/optimizer.py). Weights are cut into chunks, and a program
processes one chunk of one tensor, found through a table of addresses; 16 bytes at a time, if all tensors are aligned.
Sums are computed in a fixed order, per chunk and then per tensor, in fp64, so a step is reproducible to the bit. Not
yet run on a GPU.

Shape legend: P parameters of one block, K chunks of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1 << 15  # weights of one program
WIDTH = 1 << 10  # weights processed at a time
SUMS = 3  # squares of the clipping ratio, of the gradient, of the direction
ACCESS = 16  # bytes of the widest access


@triton.jit
def _find(table, part, chunk, num_params, ALIGNED: tl.constexpr):
    """Return the address of this chunk's tensor from one of the table's four columns."""
    address = tl.load(table + part * num_params + chunk).to(tl.pointer_type(tl.float32))
    return tl.multiple_of(address, 16) if ALIGNED else address


@triton.jit
def _bounds(owner, chunk, start_K, size_P, ALIGNED: tl.constexpr):
    """Return the first element of a chunk and the size of its tensor, with alignment hints for the compiler."""
    start, size = tl.load(start_K + chunk), tl.load(size_P + owner)
    if ALIGNED:
        start, size = tl.multiple_of(start, 16), tl.multiple_of(size, 4)
    return start, size


@triton.jit
def _move_moments(
    table,
    owner_K,
    start_K,
    size_P,
    sums_K3,
    num_params,
    new1,
    new2,
    eps,
    decay,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    chunk = tl.program_id(0)
    owner = tl.load(owner_K + chunk)
    start, size = _bounds(owner, chunk, start_K, size_P, ALIGNED)
    param, grad = _find(table, 0, owner, num_params, ALIGNED), _find(table, 1, owner, num_params, ALIGNED)
    exp_avg, exp_avg_sq = _find(table, 2, owner, num_params, ALIGNED), _find(table, 3, owner, num_params, ALIGNED)
    ratios = tl.zeros((WIDTH,), tl.float64)
    grads = tl.zeros((WIDTH,), tl.float64)
    directions = tl.zeros((WIDTH,), tl.float64)
    for offset in range(0, CHUNK, WIDTH):
        at = start + offset + tl.arange(0, WIDTH)
        inside = at < size
        g = tl.load(grad + at, mask=inside, other=0.0)
        m = tl.load(exp_avg + at, mask=inside, other=0.0)
        v = tl.load(exp_avg_sq + at, mask=inside, other=0.0)
        p = tl.load(param + at, mask=inside, other=0.0)
        m = m + new1 * (g - m)
        v = v * (1 - new2) + new2 * g * g
        tl.store(exp_avg + at, m, mask=inside)
        tl.store(exp_avg_sq + at, v, mask=inside)
        root = tl.sqrt(v)
        ratio = g / tl.where(root < eps, eps, root)  # keeps a NaN
        direction = m / (root + eps) + decay * p
        ratios += tl.where(inside, (ratio * ratio).to(tl.float64), 0.0)
        grads += (g * g).to(tl.float64)
        directions += tl.where(inside, (direction * direction).to(tl.float64), 0.0)
    tl.store(sums_K3 + 3 * chunk, tl.sum(ratios))
    tl.store(sums_K3 + 3 * chunk + 1, tl.sum(grads))
    tl.store(sums_K3 + 3 * chunk + 2, tl.sum(directions))


@triton.jit
def _apply(
    table,
    owner_K,
    start_K,
    size_P,
    rate_P,
    num_params,
    eps,
    decay,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    chunk = tl.program_id(0)
    owner = tl.load(owner_K + chunk)
    rate = tl.load(rate_P + owner)
    start, size = _bounds(owner, chunk, start_K, size_P, ALIGNED)
    param = _find(table, 0, owner, num_params, ALIGNED)
    exp_avg, exp_avg_sq = _find(table, 2, owner, num_params, ALIGNED), _find(table, 3, owner, num_params, ALIGNED)
    for offset in range(0, CHUNK, WIDTH):
        at = start + offset + tl.arange(0, WIDTH)
        inside = at < size
        m = tl.load(exp_avg + at, mask=inside, other=0.0)
        v = tl.load(exp_avg_sq + at, mask=inside, other=0.0)
        p = tl.load(param + at, mask=inside, other=0.0)
        tl.store(param + at, p - rate * (m / (tl.sqrt(v) + eps) + decay * p), mask=inside)


@dataclass(frozen=True)
class TensorTable:
    """How tensors of given sizes are cut into chunks; on the device, built once.

    Attributes:
        sizes: elements of each tensor, on the host.
        owner_K, start_K: int32 tensor and int64 first element of each chunk.
        size_P, global_size_P: int64 local size, and fp64 size of the whole tensor, which may be sharded.
        first_P: int64, first chunk of each tensor, and at the end the number of chunks.
    """

    sizes: tuple[int, ...]
    owner_K: Tensor
    start_K: Tensor
    size_P: Tensor
    global_size_P: Tensor
    first_P: Tensor

    @classmethod
    def of(cls, sizes: Sequence[int], global_sizes: Sequence[int], device: torch.device) -> TensorTable:
        """Cut tensors into chunks; an empty shard has none."""
        chunks_P = np.array([-(-size // CHUNK) for size in sizes], dtype=np.int64)
        first_P = np.concatenate(([0], np.cumsum(chunks_P)))
        owner_K = np.repeat(np.arange(len(sizes)), chunks_P)
        start_K = (np.arange(first_P[-1]) - first_P[owner_K]) * CHUNK

        def put(values: object, dtype: torch.dtype) -> Tensor:
            return torch.as_tensor(np.asarray(values)).to(device=device, dtype=dtype)

        return cls(
            tuple(sizes),
            put(owner_K, torch.int32),
            put(start_K, torch.int64),
            put(sizes, torch.int64),
            put(global_sizes, torch.float64),
            put(first_P, torch.int64),
        )


class Addresses(NamedTuple):
    """The addresses of tensors.

    Attributes:
        table: int64 [columns, P], on their device.
        aligned: True if every tensor begins and ends at a multiple of 16 bytes.
    """

    table: Tensor
    aligned: bool


def addresses(*columns: Sequence[Tensor]) -> Addresses:
    """Collect the addresses of tensors and copy them to their device without a sync.

    Raises:
        ValueError: a tensor is not contiguous or not fp32, as the kernels require.
    """
    for tensors in columns:
        for tensor in tensors:
            if not tensor.is_contiguous() or tensor.dtype != torch.float32:
                raise ValueError(
                    f"{tensor.dtype} tensor of shape {tuple(tensor.shape)}, strides {tensor.stride()} (optim.fused): "
                    "the kernels need contiguous fp32 tensors. Set optim.fused=false."
                )
    pointers = [[tensor.data_ptr() for tensor in tensors] for tensors in columns]
    table, device = torch.tensor(pointers), columns[0][0].device
    ends = [tensor.nbytes for tensor in columns[0]]
    aligned = all(address % ACCESS == 0 for places in [*pointers, ends] for address in places)
    return Addresses(table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table, aligned)


def move_moments(
    pointers: Addresses, layout: TensorTable, *, new1: float, new2: float, eps: float, decay: float
) -> Tensor:
    """Update the moments in place: m moves towards g by the share new1, v towards g^2 by new2.

    Args:
        pointers: of params, grads, exp_avgs and exp_avg_sqs.
        layout: of their sizes.
        new1, new2, eps: see StableAdamW.
        decay: weight_decay / max_lr, the weight's factor in its direction.

    Returns:
        sums_3P: fp64 sums over the local elements of g^2 / max(v, eps^2) / (global size), g^2 and direction^2.
    """
    params, chunks, device = len(layout.sizes), len(layout.owner_K), pointers.table.device
    sums_K3 = torch.empty((max(1, chunks), SUMS), dtype=torch.float64, device=device)
    if chunks:
        _move_moments[(chunks,)](
            pointers.table,
            layout.owner_K,
            layout.start_K,
            layout.size_P,
            sums_K3,
            params,
            new1,
            new2,
            eps,
            decay,
            pointers.aligned,
            CHUNK,
            WIDTH,
        )
    # unsafe skips a check of the offsets that would sync with the device; an empty shard sums to 0
    sums_P3 = torch.segment_reduce(sums_K3[:chunks], "sum", offsets=layout.first_P, axis=0, unsafe=True, initial=0)
    sums_P3[:, 0] /= layout.global_size_P
    return sums_P3.t().contiguous()


def apply_updates(pointers: Addresses, layout: TensorTable, rate_P: Tensor, *, eps: float, decay: float) -> None:
    """Compute p = p - rate (m / (sqrt(v) + eps) + decay p), in place, with a rate for each tensor."""
    if len(layout.owner_K):
        _apply[(len(layout.owner_K),)](
            pointers.table,
            layout.owner_K,
            layout.start_K,
            layout.size_P,
            rate_P.float().contiguous(),
            len(layout.sizes),
            eps,
            decay,
            pointers.aligned,
            CHUNK,
            WIDTH,
        )
