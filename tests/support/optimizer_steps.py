"""Weights and gradients for tests of optimizers; always the same."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

Shapes = Iterable[tuple[int, ...]]


def make_params(shapes: Shapes, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def make_grads(shapes: Shapes, step: int, factor: float) -> list[Tensor]:
    """Return gradients of very different sizes: each is smaller than the one before by this factor."""
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) * factor**-i for i, shape in enumerate(shapes)]


def step_with(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], grads: list[Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.to(param.device, param.dtype, copy=True)
    optimizer.step()
