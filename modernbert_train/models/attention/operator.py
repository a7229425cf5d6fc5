"""Attention within boundaries as a custom operator, for kernels that torch.compile cannot trace.

The fake kernel and the backward operator make it one node of a compiled layer's graph.

Shape legend: T packed tokens, S sequences (padded), N heads, H head width.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.library import CustomOpDef

_QKV = "Tensor q, Tensor k, Tensor v"
_WHERE = "Tensor cu_seqlens, SymInt longest, SymInt before, SymInt after"


class Forward(Protocol):
    """The forward function of an operator."""

    def __call__(
        self, q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, cu_seqlens_S: Tensor, longest: int, before: int, after: int
    ) -> tuple[Tensor, Tensor]:
        """Return out_TNH and the fp32 log-sum-exp lse_NT.

        Args:
            q_TNH, k_TNH, v_TNH: inputs.
            cu_seqlens_S: boundaries, int32; empty sequences pad it.
            longest: upper bound of the sequences' lengths.
            before, after: tokens visible on each side, see `Visible.sides`; -1 for all.
        """


class Backward(Protocol):
    """The backward function of an operator."""

    def __call__(
        self,
        grad_TNH: Tensor,
        q_TNH: Tensor,
        k_TNH: Tensor,
        v_TNH: Tensor,
        out_TNH: Tensor,
        lse_NT: Tensor,
        cu_seqlens_S: Tensor,
        longest: int,
        before: int,
        after: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v; `grad_TNH` is contiguous."""


def operator(name: str, forward: Forward, backward: Backward) -> tuple[CustomOpDef, CustomOpDef]:
    """Register `forward` as an operator, with its backward operator; both return contiguous tensors."""

    def attend(*arguments: Any) -> tuple[Tensor, Tensor]:
        out_TNH, lse_NT = forward(*arguments)
        # the layouts that the fake functions promise: a compiled layer computes addresses from those
        return out_TNH.contiguous(), lse_NT.contiguous()

    def fake_attend(q_TNH: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        tokens, heads = q_TNH.shape[:2]
        return q_TNH.new_empty(q_TNH.shape), q_TNH.new_empty((heads, tokens), dtype=torch.float32)

    def differentiate(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        dq_TNH, dk_TNH, dv_TNH = backward(*arguments)
        return dq_TNH.contiguous(), dk_TNH.contiguous(), dv_TNH.contiguous()

    def fake_differentiate(
        _grad_TNH: Tensor, q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, *_: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        return q_TNH.new_empty(q_TNH.shape), k_TNH.new_empty(k_TNH.shape), v_TNH.new_empty(v_TNH.shape)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q_TNH, k_TNH, v_TNH, cu_seqlens_S, *ctx.numbers = inputs
        ctx.save_for_backward(q_TNH, k_TNH, v_TNH, *output, cu_seqlens_S)

    def through(ctx: Any, grad_TNH: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        # autograd may give an expanded gradient; kernels need the last dimension contiguous
        return (*gradients(grad_TNH.contiguous(), *ctx.saved_tensors, *ctx.numbers), None, None, None, None)

    attention = torch.library.custom_op(
        f"modernbert_train::{name}", attend, mutates_args=(), schema=f"({_QKV}, {_WHERE}) -> (Tensor, Tensor)"
    )
    gradients = torch.library.custom_op(
        f"modernbert_train::{name}_backward",
        differentiate,
        mutates_args=(),
        schema=f"(Tensor grad, {_QKV}, Tensor out, Tensor lse, {_WHERE}) -> (Tensor, Tensor, Tensor)",
    )
    attention.register_fake(fake_attend)
    gradients.register_fake(fake_differentiate)
    attention.register_autograd(through, setup_context=save)
    return attention, gradients
