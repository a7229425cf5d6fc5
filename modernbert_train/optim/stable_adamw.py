"""StableAdamW whose update clipping spans whole tensors, for any sharding.

Each parameter's rate is divided by the RMS of g^2 / v over the whole tensor when that exceeds 1. So a step has two
halves. The first updates the moments of the local shards and computes sums per parameter; one all-reduce completes the
sums of all parameters; the second half scales and applies the updates. There is no host sync, and the gradient and
update norms share the all-reduce.

Shape legend: P parameters of one block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

# The mesh of a sharded parameter and the mesh dimensions that shard it; None for an unsharded parameter.
Sharding = tuple[DeviceMesh, tuple[int, ...]] | None


@dataclass
class _Block:
    """Parameters that are stepped together: one group, one step count, one sharding. Tensors are local shards."""

    group: dict[str, Any]
    step: int
    sharding: Sharding
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)
    global_sizes: list[int] = field(default_factory=list)


class StableAdamW(Optimizer):
    """AdamW with debiased betas, per-tensor update clipping and fully decoupled weight decay.

    For step t of a parameter p with gradient g, moments m and v, and b_t = b (1 - b^(t-1)) / (1 - b^t) for each beta:

        m = b1_t m + (1 - b1_t) g            v = b2_t v + (1 - b2_t) g^2
        rms = sqrt(mean(g^2 / max(v, eps^2)))          over the whole tensor, all shards included
        lr_p = lr / max(1, rms)
        p = p (1 - lr_p / max_lr * weight_decay) - lr_p m / (sqrt(v) + eps)

    The last line is computed as p - lr_p (m / (sqrt(v) + eps) + weight_decay / max_lr * p), so that decay and update
    are rounded once, together: the decay factor alone has few digits in fp32, and is 1 if less than 3e-8 below 1.

    Parameters are fp32 tensors, or DTensors sharded over any dimensions of a mesh (FSDP2, HSDP); moments are sharded
    like their parameter. A step briefly needs the memory of two more copies of the local parameters. The optimizer
    keeps no references to the constructor's parameters, so a trainer may replace them in `param_groups`.

    Args:
        params: parameters, or dicts of param groups.
        lr: learning rate of the next step.
        betas: decay rates of the two moments.
        eps: added to sqrt(v).
        weight_decay: share of a weight that a step at max_lr removes.
        max_lr: peak rate of the schedule, which normalises the decay; None is each group's lr. It is a plain key of
            every param group, so a new phase sets it and does not inherit it from a checkpoint.
        fused: run each half of a step as one kernel over all weights, see optim/fused.py; needs Triton. It saves the
            extra memory and equals the other form up to fp32 rounding.

    Attributes:
        last_grad_norm: 0-dim fp32 tensor on the parameters' device, L2 norm of the last step's gradients over all
            groups and shards, equal on every rank; NaN before the first step.
        last_update_norm: the same for the change of the weights, decay included.

    Raises:
        ValueError: a hyperparameter is out of range, or a parameter is not fp32 (or fp64, which fused does not take).
        ImportError: fused without Triton.

    Source: Wortsman et al. 2023, arXiv:2304.13013, algorithm 2; fully decoupled decay as in torch-optimi (MIT).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        max_lr: float | None = None,
        fused: bool = False,
    ) -> None:
        defaults = {"lr": lr, "max_lr": max_lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self._kernels = import_module("modernbert_train.optim.fused") if fused else None
        self._layouts: dict[tuple[Any, ...], Any] = {}
        self.last_grad_norm = torch.tensor(math.nan)
        self.last_update_norm = torch.tensor(math.nan)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; a missing max_lr becomes the group's lr.

        Raises:
            ValueError: see the class.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["max_lr"] is None:
            group["max_lr"] = group["lr"]
        _check_group(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with the current gradients; parameters without one are skipped.

        Args:
            closure: called first, with gradients enabled, to compute them.

        Returns:
            The closure's result, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        halves = self._halves(self.param_groups)
        if not halves:
            return loss

        sums = _sum_over_shards([half.sharding for half in halves], [half.prepare() for half in halves])

        grad_square = torch.zeros_like(sums[0][0, 0])
        update_square = torch.zeros_like(grad_square)
        for half, sums_3P in zip(halves, sums, strict=True):
            ratio_P, grad_P, direction_P = sums_3P
            # let a NaN pass through clamp and reach the weights: it must be seen, not clipped away
            rate_P = half.group["lr"] / ratio_P.sqrt().clamp(min=1.0)
            half.apply(rate_P)
            grad_square += grad_P.sum()
            update_square += (rate_P.square() * direction_P).sum()
        self.last_grad_norm = grad_square.sqrt().float()
        self.last_update_norm = update_square.sqrt().float()
        return loss

    def _halves(self, groups: Iterable[dict[str, Any]]) -> list[Halves]:
        """Return the pending step of each block of these groups; increments step counts."""
        blocks = self._collect_blocks(groups)
        return [_Foreach(block) if self._kernels is None else self._fused(block) for block in blocks]

    def _fused(self, block: _Block) -> _Fused:
        assert self._kernels is not None
        sizes, device = tuple(param.numel() for param in block.params), block.params[0].device
        key = (sizes, tuple(block.global_sizes), device)
        if key not in self._layouts:
            self._layouts[key] = self._kernels.TensorTable.of(sizes, block.global_sizes, device)
        return _Fused(self._kernels, self._layouts[key], block)

    def _collect_blocks(self, groups: Iterable[dict[str, Any]]) -> list[_Block]:
        """Sort the parameters with a gradient into blocks, in the same order on every rank; increment their steps."""
        blocks: list[_Block] = []
        for group in groups:
            by_key: dict[tuple[int, Sharding], _Block] = {}
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    check_dtype(param)
                    # a Python int: a tensor could be moved to the device by loading, and reading it would sync
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                    state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                state["step"] += 1
                key = (state["step"], sharding_of(param))
                block = by_key.setdefault(key, _Block(group, *key))
                block.params.append(local(param))
                block.grads.append(local(param.grad))
                block.exp_avgs.append(local(state["exp_avg"]))
                block.exp_avg_sqs.append(local(state["exp_avg_sq"]))
                block.global_sizes.append(param.numel())
            blocks.extend(by_key.values())
        return blocks


class Halves(Protocol):
    """The two halves of one block's step.

    Attributes:
        group: its rate applies.
        sharding: of its parameters.
    """

    group: dict[str, Any]
    sharding: Sharding

    def prepare(self) -> Tensor:
        """Update the moments in place; return sums_3P over the local shards, see `_Foreach.prepare`."""
        ...

    def apply(self, rate_P: Tensor) -> None:
        """Step each parameter by its rate."""
        ...


class _Foreach:
    """The two halves of a block's step, as foreach operations."""

    def __init__(self, block: _Block) -> None:
        self._block, self.group, self.sharding = block, block.group, block.sharding
        self._directions: tuple[Tensor, ...] = ()

    def prepare(self) -> Tensor:
        """Update the moments in place and return the sums for the step.

        Works in place where possible: on a CPU, allocating memory costs more than arithmetic (3.5 times the step).

        Returns:
            sums_3P: fp64 sums over the local shards of g^2 / max(v, eps^2) / (global size), g^2 and direction^2. The
                direction is the update before the parameter's rate: m / (sqrt(v) + eps) plus the decay.
        """
        block, group = self._block, self._block.group
        new1, new2 = _new_shares(block)
        torch._foreach_lerp_(block.exp_avgs, block.grads, new1)
        torch._foreach_mul_(block.exp_avg_sqs, 1 - new2)
        torch._foreach_addcmul_(block.exp_avg_sqs, block.grads, block.grads, new2)

        directions = torch._foreach_sqrt(block.exp_avg_sqs)
        ratios = torch._foreach_clamp_min(directions, group["eps"])
        torch._foreach_reciprocal_(ratios)
        torch._foreach_mul_(ratios, block.grads)
        ratio_norms = tensor_norms(ratios)
        torch._foreach_div_(ratio_norms, [math.sqrt(size) for size in block.global_sizes])
        del ratios

        torch._foreach_add_(directions, group["eps"])
        torch._foreach_reciprocal_(directions)
        torch._foreach_mul_(directions, block.exp_avgs)
        if decay := decay_share(group):
            torch._foreach_add_(directions, block.params, alpha=decay)
        self._directions = directions
        norms = (ratio_norms, tensor_norms(block.grads), tensor_norms(directions))
        return torch.stack([torch.stack(norms_P) for norms_P in norms]).square()

    def apply(self, rate_P: Tensor) -> None:
        """Step each parameter by its rate."""
        block = self._block
        torch._foreach_mul_(self._directions, rate_P.to(block.params[0].dtype).unbind())
        torch._foreach_sub_(block.params, self._directions)


class _Fused:
    """The two halves of a block's step, as Triton kernels; see optim/fused.py."""

    def __init__(self, kernels: Any, layout: Any, block: _Block) -> None:
        self._kernels, self._layout, self._block = kernels, layout, block
        self.group, self.sharding = block.group, block.sharding
        self._places = kernels.addresses(block.params, block.grads, block.exp_avgs, block.exp_avg_sqs)
        self._constants = {"eps": block.group["eps"], "decay": decay_share(block.group)}

    def prepare(self) -> Tensor:
        new1, new2 = _new_shares(self._block)
        sums_3P: Tensor = self._kernels.move_moments(
            self._places, self._layout, new1=new1, new2=new2, **self._constants
        )
        return sums_3P

    def apply(self, rate_P: Tensor) -> None:
        self._kernels.apply_updates(self._places, self._layout, rate_P, **self._constants)


def _new_shares(block: _Block) -> tuple[float, float]:
    """Return 1 - b_t for both betas; at the first step 1, which overwrites the moments' initial zeros."""
    beta1, beta2 = block.group["betas"]
    return (1 - beta1) / (1 - beta1**block.step), (1 - beta2) / (1 - beta2**block.step)


def decay_share(group: dict[str, Any]) -> float:
    """Return the factor of a weight in its direction: weight_decay / max_lr."""
    return group["weight_decay"] / group["max_lr"] if group["weight_decay"] else 0.0


def tensor_norms(tensors: tuple[Tensor, ...] | list[Tensor]) -> tuple[Tensor, ...]:
    """Return the L2 norm of each tensor, 0-dim fp64, as exact for a whole tensor as for its shards.

    One long fp32 sum on a CPU errs by 7e-4 for an embedding of 39 M weights, and an fp64 sum takes longer than the
    rest of the step (both measured); so rows are summed first. CUDA's kernel sums short chunks by itself.
    """
    if tensors[0].device.type == "cpu":
        tensors = [torch.linalg.vector_norm(tensor, dim=-1) for tensor in tensors]
    return torch._foreach_norm(tensors, 2, dtype=torch.float64)


def _sum_over_shards(shardings: list[Sharding], sums: list[Tensor]) -> list[Tensor]:
    """Complete the sums_3P of all blocks, with one all-reduce per mesh dimension that shards parameters."""
    result = list(sums)
    by_sharding: dict[Sharding, list[int]] = {}
    for index, sharding in enumerate(shardings):
        by_sharding.setdefault(sharding, []).append(index)
    for sharding, indices in by_sharding.items():
        if sharding is None:
            continue
        mesh, dims = sharding
        together = torch.cat([sums[index] for index in indices], dim=1)
        for dim in dims:
            dist.all_reduce(together, group=mesh.get_group(dim))
        pieces = together.split([sums[index].shape[1] for index in indices], dim=1)
        for index, part in zip(indices, pieces, strict=True):
            result[index] = part
    return result


def sharding_of(param: Tensor) -> Sharding:
    """Return how a parameter and its gradient are sharded."""
    if not isinstance(param, DTensor):
        return None
    assert isinstance(param.grad, DTensor) and param.grad.placements == param.placements, "gradient sharded otherwise"
    dims = tuple(dim for dim, placement in enumerate(param.placements) if not placement.is_replicate())
    return (param.device_mesh, dims) if dims else None


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or the tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _check_group(group: dict[str, Any]) -> None:
    if not group["lr"] >= 0:
        raise ValueError(f"lr={group['lr']} (StableAdamW): must be at least 0. Set the peak learning rate.")
    if group["weight_decay"] < 0 or (group["weight_decay"] > 0 and not group["max_lr"] > 0):
        raise ValueError(
            f"weight_decay={group['weight_decay']}, max_lr={group['max_lr']} (StableAdamW): decay must be at least 0 "
            "and is divided by max_lr. Give the schedule's peak rate as max_lr."
        )
    if not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(f"betas={group['betas']} (StableAdamW): each must be in [0, 1). Usual are (0.9, 0.98).")
    if not group["eps"] > 0:
        raise ValueError(f"eps={group['eps']} (StableAdamW): must be above 0. Usual is 1e-6.")
    for param in group["params"]:
        check_dtype(param)


def check_dtype(param: Tensor) -> None:
    """Raise ValueError for master weights of low precision, in which most updates would round to nothing."""
    if param.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"{param.dtype} parameter of shape {tuple(param.shape)} (StableAdamW): master weights must be float32. "
            "Keep the model in float32 and compute in bf16 through autocast or the mixed precision of FSDP."
        )


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], norm: float, max_norm: float) -> None:
    """Scale gradients in place, sharded or whole, so that their norm is at most `max_norm`.

    Args:
        parameters: those without a gradient are skipped.
        norm: of the whole gradient, over all ranks. If it is NaN, all gradients become NaN, as in torch.
        max_norm: above 0.
    """
    share = max_norm / (norm + 1e-6)  # as in torch.nn.utils.clip_grad_norm_
    if share >= 1:
        return
    grads = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(grads, share)
