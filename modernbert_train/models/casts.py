"""Cast weights to autocast's precision once a step, not once a microbatch.

Autocast drops its casts at the end of each forward pass, and a compiled layer casts within its graph: 6 bytes a weight
and a kernel a matrix, in every microbatch. The result is bit-identical where a pass uses a weight once: gradients are
still computed in the lower precision and accumulated in fp32. Where layers share a weight, eager autocast would sum
their gradients in the lower precision; here, as in compiled layers, each is added in fp32.
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
    """nn.Linear whose weight may be cast ahead.

    Attributes:
        cast: within `cast_once`, the weight in lower precision, without a gradient.
    """

    cast: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.cast is None else _InPlaceOf.apply(self.weight, self.cast)
        return F.linear(x, weight, self.bias)


class _InPlaceOf(torch.autograd.Function):
    """Use the second tensor in the forward pass and give its gradient to the first.

    Call it in each forward pass: autograd runs backward from the newest node to the oldest. The gradient of a cast that
    is older than the whole pass would arrive after all others, and DDP could not overlap communication.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, cast: Tensor) -> Tensor:
        return cast.view_as(cast)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.float(), None


@contextmanager
def cast_once(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Cast the weights of every `Linear` for all passes within the context; weights must not change there.

    FSDP2's shards are left alone: it gathers weights in fp32 for each pass, and autocast casts them there.

    Args:
        model: as it is called.
        dtype: autocast's; None: autocast is off, and nothing is cast.
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
