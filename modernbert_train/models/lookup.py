"""Embedding lookups whose gradients are summed by torch's own kernels, in compiled code too.

Inductor would sum the gradients with atomic operations: in no fixed order, serialised where a row is read often ([MASK]
by a quarter of the tokens), and for bf16 with a fallback that sorts. Custom operators keep torch's kernels. The forward
pass is left to Inductor, which fuses the lookup into the norm that follows.

Shape legend: T packed tokens, M positions, V rows of the table, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@torch.library.custom_op("modernbert_train::table_gradient", mutates_args=())
def _table_gradient(grad_TD: Tensor, ids_T: Tensor, rows: int) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(grad_TD, ids_T, rows, -1, False)


@_table_gradient.register_fake
def _(grad_TD: Tensor, ids_T: Tensor, rows: int) -> Tensor:
    return grad_TD.new_empty((rows, grad_TD.shape[1]))


@torch.library.custom_op("modernbert_train::rows_gradient", mutates_args=())
def _rows_gradient(grad_MD: Tensor, positions_M: Tensor, rows: int) -> Tensor:
    return grad_MD.new_zeros((rows, grad_MD.shape[1])).index_add_(0, positions_M, grad_MD)


@_rows_gradient.register_fake
def _(grad_MD: Tensor, positions_M: Tensor, rows: int) -> Tensor:
    return grad_MD.new_empty((rows, grad_MD.shape[1]))


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table_VD: Tensor, ids_T: Tensor) -> Tensor:
        ctx.save_for_backward(ids_T)
        ctx.rows = table_VD.shape[0]
        return F.embedding(ids_T, table_VD)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (ids_T,) = ctx.saved_tensors
        return _table_gradient(grad_TD.contiguous(), ids_T, ctx.rows), None


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, positions_M: Tensor) -> Tensor:
        ctx.save_for_backward(positions_M)
        ctx.rows = x_TD.shape[0]
        return x_TD.index_select(0, positions_M)

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (positions_M,) = ctx.saved_tensors
        return _rows_gradient(grad_MD.contiguous(), positions_M, ctx.rows), None


class Embedding(nn.Embedding):
    """nn.Embedding without its options, and with a deterministic gradient when compiled."""

    def forward(self, ids_T: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return _LookUp.apply(self.weight, ids_T)
        return F.embedding(ids_T, self.weight)


def take_rows(x_TD: Tensor, positions_M: Tensor) -> Tensor:
    """Return rows of a matrix, [M, D]; gradients of a row that is taken several times are summed."""
    if torch.compiler.is_compiling():
        return _TakeRows.apply(x_TD, positions_M)
    # index_select: its backward pass adds rows in place; the one of x_TD[positions_M] sorts the positions first
    return x_TD.index_select(0, positions_M)
