"""Muon and NorMuon: matrices step along the orthogonal matrix nearest to their momentum, other weights by StableAdamW.

One optimizer means one clock, one state and one checkpoint, and gradient and update norms over all weights.
Orthogonalising needs a whole matrix, so each sharded matrix has an owner among the ranks that share it. Its momentum
stays sharded; the update is gathered to the owner, and the direction scattered back, in two collectives for all
matrices together. The owner computes exactly what a single process would, so the number of shards does not change a bit
of a direction. Ranks with whole matrices (DDP, and each replica under HSDP) compute every one locally, without
communication.

Shape legend: M rows and N columns of a matrix, B matrices stacked in a weight, R = B * M rows of a
weight, P weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from modernbert_train.optim.stable_adamw import (
    Halves,
    Sharding,
    StableAdamW,
    check_dtype,
    decay_share,
    local,
    sharding_of,
    tensor_norms,
)

_Divided = tuple[DeviceMesh, tuple[int, ...]]  # a Sharding that is not None

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic; singular values end between about 0.7 and 1.2
_TINY = 1e-7  # lower bound of a divisor; a zero matrix stays zero
_ROW_EPS = 1e-10

# how an orthogonal matrix of M rows and N columns is scaled, by the names of torch.optim.Muon
SCALES: dict[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The step of matrices.

    Attributes:
        momentum: decay rate of the momentum.
        nesterov: orthogonalise a mixture of gradient and momentum.
        iterations: of Newton-Schulz.
        scale: key of SCALES.
        row_beta: decay rate of NorMuon's mean square of each row; None is Muon.
        cautious_decay: decay an entry only where the update shrinks it too.

    Raises:
        ValueError: a value is out of range.
    """

    momentum: float = 0.95
    nesterov: bool = True
    iterations: int = 5
    scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    row_beta: float | None = None
    cautious_decay: bool = False

    def __post_init__(self) -> None:
        for name, value in (("momentum", self.momentum), ("row_beta", self.row_beta)):
            if value is not None and not 0 <= value < 1:
                raise ValueError(f"{name}={value} (Muon): must be in [0, 1). Usual is 0.95.")
        if self.iterations < 1:
            raise ValueError(f"iterations={self.iterations} (Muon): at least 1. Usual is 5.")
        if self.scale not in SCALES:
            raise ValueError(f"scale={self.scale!r} (Muon): one of {', '.join(SCALES)}.")


class Muon(StableAdamW):
    """Muon for groups with `parts` (the number of stacked matrices in each weight), StableAdamW for the others.

    For a matrix of M rows and N columns with gradient g, momentum m and, in NorMuon, mean squares v of its rows:

        m = mu m + (1 - mu) g        u = mu m + (1 - mu) g, the new m; without nesterov u = m
        o = NewtonSchulz(u)          a polynomial of u that brings its singular values near 1
        Muon       d = s o           s = 0.2 sqrt(max(M, N)) (match_rms_adamw) or sqrt(max(1, M / N)) (original)
        NorMuon    v = b v + (1 - b) mean of o^2 over a row; r = o / (sqrt(v) + 1e-10)
                   d = s sqrt(min(M, N)) r / |r|, with the norm of s times an orthogonal matrix
        p = p (1 - lr / max_lr * weight_decay) - lr d, with cautious_decay only where p d > 0, else p - lr d

    The last line is StableAdamW's, decay included, without clipping: the size of d is fixed. With match_rms_adamw an
    update has an RMS of 0.2, about as Adam's, so Adam's rates can be used; with original, rates of about 0.02 are
    usual.

    Newton-Schulz runs in bf16 on GPUs and in the weights' precision on CPUs; everything else in the weights' precision.
    Weights are fp32 tensors or DTensors whose rows one dimension of a mesh shards (FSDP2, HSDP). Under FSDP2 a step
    briefly needs about three copies of the local matrices, else one, and two of all other weights.

    Args:
        params: dicts of param groups. With `parts`, its weights are matrices: `parts` is, for each weight, the number
            of
            equal matrices stacked along its rows, which are orthogonalised one by one.
        lr: see StableAdamW.
        rule: for the matrices.
        adam: the other arguments of StableAdamW; max_lr and weight_decay apply to matrices too.

    Raises:
        ValueError: see StableAdamW; a group whose parts do not divide its matrices.

    Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv:2502.16982, for the scale; Li
    et al. 2025, arXiv:2510.05491, for NorMuon; Chen et al. 2025, arXiv:2510.12402, for cautious decay. momentum,
    nesterov and scale are as in torch.optim.Muon.
    """

    def __init__(self, params: Iterable[Any], lr: float, *, rule: Rule | None = None, **adam: Any) -> None:
        self.rule = rule or Rule()
        super().__init__(params, lr, **adam)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Raises ValueError: see the class."""
        super().add_param_group({"parts": None} | param_group)
        group = self.param_groups[-1]
        if group["parts"] is None:
            return
        for param, parts in zip(group["params"], group["parts"], strict=True):
            if param.ndim != 2 or param.shape[0] % parts:
                raise ValueError(f"{tuple(param.shape)} weight (Muon): is not {parts} stacked matrices.")

    def _halves(self, groups: Iterable[dict[str, Any]]) -> list[Halves]:
        groups = list(groups)
        matrices = [self._matrices(group) for group in groups if group["parts"] is not None]
        others = super()._halves(group for group in groups if group["parts"] is None)
        return [*(block for blocks in matrices for block in blocks), *others]

    def _matrices(self, group: dict[str, Any]) -> list[_Matrices]:
        """Group the matrices that have a gradient by sharding, in the same order on every rank."""
        blocks: dict[Sharding, _Matrices] = {}
        for param, parts in zip(group["params"], group["parts"], strict=True):
            if param.grad is None:
                continue
            state = self.state[param]
            if not state:
                check_dtype(param)
                state["momentum"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                if self.rule.row_beta is not None:
                    state["row_square"] = _column_like(param)
            sharding = sharding_of(param)
            divided = sharding is not None and [param.placements[dim] for dim in sharding[1]]
            assert not divided or divided == [Shard(0)], f"{divided}: matrices must be sharded by rows, once"
            block = blocks.setdefault(sharding, _Matrices(group, sharding, self.rule))
            block.params.append(local(param))
            block.grads.append(local(param.grad))
            block.momenta.append(local(state["momentum"]))
            if "row_square" in state:
                block.row_squares.append(local(state["row_square"]))
            block.parts.append(parts)
            block.rows.append(param.shape[0])
        return list(blocks.values())


@dataclass
class _Matrices:
    """Matrices that are stepped together; tensors are local shards, `rows` counts rows of the whole weights."""

    group: dict[str, Any]
    sharding: Sharding
    rule: Rule
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    momenta: list[Tensor] = field(default_factory=list)
    row_squares: list[Tensor] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    directions: list[Tensor] = field(default_factory=list)

    def prepare(self) -> Tensor:
        """Update momenta and mean squares in place; see `Halves`. The first row of sums is zero: no clipping."""
        torch._foreach_lerp_(self.momenta, self.grads, 1 - self.rule.momentum)
        if self.sharding is None:
            updates = map(self._mixed, self.grads, self.momenta)  # lazily: each is a copy
            squares = self.row_squares or itertools.repeat(None)
            self.directions = list(map(self._direction, updates, squares, self.parts))
        else:
            self.directions = self._directions_by_owners(self.sharding)
        if decay := decay_share(self.group):
            decayed = self.params
            if self.rule.cautious_decay:
                pairs = zip(self.params, self.directions, strict=True)
                decayed = [param * (param * direction > 0) for param, direction in pairs]
            torch._foreach_add_(self.directions, decayed, alpha=decay)
        grad_P, direction_P = (torch.stack(tensor_norms(each)) for each in (self.grads, self.directions))
        return torch.stack([torch.zeros_like(grad_P), grad_P, direction_P]).square()

    def apply(self, rate_P: Tensor) -> None:
        torch._foreach_mul_(self.directions, rate_P.to(self.params[0].dtype).unbind())
        torch._foreach_sub_(self.params, self.directions)

    def _mixed(self, grad: Tensor, momentum: Tensor) -> Tensor:
        return grad.lerp(momentum, self.rule.momentum) if self.rule.nesterov else momentum

    def _direction(self, update_RN: Tensor, row_square: Tensor | None, parts: int) -> Tensor:
        """Return d of a whole weight, R = B * M rows; updates row_square [R, 1] in place."""
        result_BMN = orthogonalize(update_RN.unflatten(0, (parts, -1)), self.rule.iterations)
        rows, columns = result_BMN.shape[1:]
        scale = SCALES[self.rule.scale](rows, columns)
        if row_square is None:
            return result_BMN.mul_(scale).flatten(0, 1)
        assert self.rule.row_beta is not None
        square_BM1 = row_square.unflatten(0, (parts, -1))
        square_BM1.lerp_(result_BMN.square().mean(-1, keepdim=True), 1 - self.rule.row_beta)
        result_BMN.div_(square_BM1.sqrt().add_(_ROW_EPS))
        norm_B11 = torch.linalg.matrix_norm(result_BMN, keepdim=True).clamp_(min=_TINY)
        return result_BMN.mul_(scale * math.sqrt(min(rows, columns)) / norm_B11).flatten(0, 1)

    def _directions_by_owners(self, sharding: _Divided) -> list[Tensor]:
        """Return the local shards of the directions; mean squares travel as a last column and come back updated."""
        shards = [self._mixed(*each) for each in zip(self.grads, self.momenta, strict=True)]
        columns = [shard.shape[1] for shard in shards]
        if self.row_squares:
            shards = [torch.cat(each, dim=1) for each in zip(shards, self.row_squares, strict=True)]
        # two of three matrix products and more cost the number of entries times the smaller side
        costs = [
            rows * width * min(rows // parts, width)
            for rows, width, parts in zip(self.rows, columns, self.parts, strict=True)
        ]
        owners = _Owners(sharding, self.rows, shards, costs)
        wholes = owners.gather(shards)
        del shards
        for position, index in enumerate(owners.mine):
            update, square = wholes[position].tensor_split([columns[index]], dim=1)
            # contiguous, or sums run in another order than for an unsharded weight
            direction = self._direction(update.contiguous(), square if self.row_squares else None, self.parts[index])
            wholes[position] = torch.cat([direction, square], dim=1) if self.row_squares else direction
        shards = owners.scatter(wholes)
        for square, shard in zip(self.row_squares, shards, strict=False):
            square.copy_(shard[:, -1:])
        return [shard[:, :width] for shard, width in zip(shards, columns, strict=True)]


def orthogonalize(x_BMN: Tensor, iterations: int) -> Tensor:
    """Bring the singular values of each matrix near 1 by a quintic Newton-Schulz; singular vectors stay.

    Args:
        x_BMN: B matrices; not changed.
        iterations: five bring singular values above about 0.005 of the norm to between 0.7 and 1.2.

    Returns:
        New matrices in the same precision; products on GPUs run in bf16.
    """
    a, b, c = COEFFICIENTS
    norm_B11 = torch.linalg.matrix_norm(x_BMN, keepdim=True).clamp(min=_TINY)
    tall = x_BMN.shape[1] > x_BMN.shape[2]
    wide = (x_BMN / norm_B11).to(torch.bfloat16 if x_BMN.is_cuda else x_BMN.dtype)
    wide = wide.mT if tall else wide
    for _ in range(iterations):
        gram = wide @ wide.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        wide = torch.baddbmm(wide, polynomial, wide, beta=a)
    return (wide.mT if tall else wide).to(x_BMN.dtype).contiguous()


@lru_cache
def share_out(costs: tuple[int, ...], owners: int) -> tuple[int, ...]:
    """Return the owner of each weight: the costliest first, each to the owner with the lowest load so far."""
    loads, result = [0] * owners, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        result[index] = min(range(owners), key=loads.__getitem__)
        loads[result[index]] += costs[index]
    return tuple(result)


class _Owners:
    """Weights whose rows are sharded over ranks, with an owner of each whole weight among these ranks.

    Args:
        sharding: the ranks.
        rows: of each whole weight.
        shards: this rank's, for their columns and precision.
        costs: of each weight; owners are balanced by it.

    Attributes:
        mine: indices of the weights that this rank owns.
    """

    def __init__(self, sharding: _Divided, rows: Sequence[int], shards: Sequence[Tensor], costs: Sequence[int]) -> None:
        mesh, (dim,) = sharding
        self._group, self._ranks, self._rank = mesh.get_group(dim), mesh.size(dim), mesh.get_local_rank(dim)
        self._rows, self._columns, self._empty = rows, [shard.shape[1] for shard in shards], shards[0].new_empty(0)
        owners = share_out(tuple(costs), self._ranks)
        self._owned = [[index for index, owner in enumerate(owners) if owner == rank] for rank in range(self._ranks)]
        self.mine = self._owned[self._rank]

    def gather(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Gather the whole weights of `mine` from the local shards of all weights."""
        outgoing = [[shards[index] for index in indices] for indices in self._owned]
        shapes = [[self._shape(index, rank) for index in self.mine] for rank in range(self._ranks)]
        incoming = self._swap(outgoing, shapes)
        return [torch.cat(pieces) for pieces in zip(*incoming, strict=True)]

    def scatter(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """Scatter the whole weights of `mine` to local shards of all weights."""
        cuts = [
            tensor.split([self._shape(index, rank)[0] for rank in range(self._ranks)])
            for index, tensor in zip(self.mine, wholes, strict=True)
        ]
        outgoing = [[cut[rank] for cut in cuts] for rank in range(self._ranks)]
        shapes = [[self._shape(index, self._rank) for index in places] for places in self._owned]
        places = [index for places in self._owned for index in places]
        shards = [shard for received in self._swap(outgoing, shapes) for shard in received]
        return [shard for _, shard in sorted(zip(places, shards, strict=True), key=lambda pair: pair[0])]

    def _shape(self, index: int, rank: int) -> tuple[int, int]:
        """Return the shape of a rank's shard: FSDP2 gives all ranks equally many rows, and the last ones the rest."""
        rows = self._rows[index]
        rows_per_rank = -(-rows // self._ranks)
        return max(0, min(rows_per_rank, rows - rank * rows_per_rank)), self._columns[index]

    def _swap(
        self, outgoing: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, int]]]
    ) -> list[list[Tensor]]:
        """Send each rank its tensors and receive tensors of these shapes from each, in one collective."""
        sent = torch.cat([self._empty, *(tensor.reshape(-1) for tensors in outgoing for tensor in tensors)])
        sent_sizes = [sum(tensor.numel() for tensor in tensors) for tensors in outgoing]
        sizes = [[math.prod(shape) for shape in each] for each in shapes]
        received = sent.new_empty(sum(map(sum, sizes)))
        dist.all_to_all_single(received, sent, [sum(each) for each in sizes], sent_sizes, group=self._group)
        pieces = iter(received.split([size for each in sizes for size in each]))
        return [[next(pieces).view(shape) for shape in each] for each in shapes]


def _column_like(param: Tensor) -> Tensor:
    """Return a zero for each row of a weight, sharded like its rows."""
    own = local(param)
    column = own.new_zeros(own.shape[0], 1)
    if not isinstance(param, DTensor):
        return column
    shape = torch.Size((param.shape[0], 1))
    return DTensor.from_local(column, param.device_mesh, param.placements, run_check=False, shape=shape, stride=(1, 1))
