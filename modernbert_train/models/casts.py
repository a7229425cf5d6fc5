"""Weights in autocast's precision, cast once a step instead of once a microbatch.

Autocast forgets its casts at the end of each forward pass, and a compiled layer casts within its graph: 6 bytes a
weight, and a kernel a matrix, in every microbatch. The result is the same to the bit where a weight is used once in a
pass: gradients still come in the lower precision, and are added up in fp32. Where layers share a weight, uncompiled
autocast would add up their gradients in the lower precision; here as in compiled layers each is added in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Linear(nn.Linear):
    """nn.Linear.

    Attributes:
        cast: within `cast_once` the weight in a lower precision, without a gradient.
    """

    cast: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.cast is None else _InPlaceOf.apply(self.weight, self.cast)
        return F.linear(x, weight, self.bias)


class _InPlaceOf(torch.autograd.Function):
    """The second tensor forward; backward its gradient is the first one's.

    Made anew in each forward pass: autograd goes backward in the order of making, newest first. The gradient of a cast
    that is older than the whole pass would come after all others, and DDP could send nothing before.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, cast: Tensor) -> Tensor:
        return cast.view_as(cast)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.float(), None


@contextmanager
def cast_once(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Cast the weights of every `Linear` now, for all forward and backward passes within; they must not change there.

    FSDP2's shards are left alone: it gathers weights in fp32 for each pass, and autocast casts them anew.

    Args:
        model: as it is called.
        dtype: of autocast; None: there is none, and nothing is done.
    """
    linears = [each for each in model.modules() if isinstance(each, Linear) and not isinstance(each.weight, DTensor)]
    if dtype is None or not linears:
        yield
        return
    weights = [linear.weight.detach() for linear in linears]
    casts = [torch.empty_like(weight, dtype=dtype) for weight in weights]
    torch._foreach_copy_(casts, weights)
    for linear, cast in zip(linears, casts, strict=True):
        linear.cast = cast
    del casts
    try:
        yield
    finally:
        for linear in linears:
            linear.cast = None
