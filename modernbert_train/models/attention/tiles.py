"""Local layers by our own Triton kernels, in tiles of 64 tokens; global layers by `varlen`. CUDA, bf16 or fp16.

It computes half as many keys as FlashAttention-2, and scores once in each pass (counts in RESULTS.md). An earlier
version, without rotation and with two backward passes, took 0.42 to 0.62 times as long on an H200 (`python -m
benchmarks.kernels --only attention`); the present one is not yet timed.

Shape legend: T packed tokens, N heads, H head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from modernbert_train.batch import Order, Packed
from modernbert_train.config.model import TILE_HEADS, Bias
from modernbert_train.config.packages import missing_on_gpu
from modernbert_train.models.attention import varlen
from modernbert_train.models.attention.visible import ScoreBias, Visible

name = "tiles"
traits = "window, rotary positions within; global layers by varlen; backward, deterministic; compiled by Triton"


@dataclass(frozen=True)
class Layout:
    """Boundaries that layers share.

    Attributes:
        first_T, end_T: int32, for each token the first token of its sequence and the one after the last.
        wide: layout of global layers.
    """

    first_T: Tensor
    end_T: Tensor
    wide: varlen.Layout


def support(device: torch.device, dtype: torch.dtype, order: Order = "all", bias: Bias | None = None) -> str | None:
    """See `Kernel.support`."""
    if (reason := varlen.support(device, dtype, order, bias)) is not None:
        return reason
    if torch.version.hip is not None:
        return "AMD GPUs have too few registers for it"
    lacks = missing_on_gpu()
    return lacks[0] if lacks else None


def is_faster(device: torch.device, local_heads: int | None) -> bool:
    """Return True where it was measured to be faster than `varlen`: on Hopper, with local heads it supports."""
    return local_heads in TILE_HEADS and device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def prepare(packed: Packed, visible: Visible) -> Layout:
    """See `Kernel.prepare`; without a host sync."""
    return Layout(*bounds(packed), varlen.prepare(packed, visible))


def bounds(packed: Packed) -> tuple[Tensor, Tensor]:
    """Return first_T and end_T of `Layout`."""
    cu_seqlens_S = packed.cu_seqlens_S
    position_T = torch.arange(len(packed.input_ids_T), dtype=torch.int32, device=cu_seqlens_S.device)
    # right=True: a boundary is the first token of the next sequence; empty sequences that pad S are skipped
    sequence_T = torch.searchsorted(cu_seqlens_S[1:].contiguous(), position_T, right=True)
    return cu_seqlens_S[sequence_T], cu_seqlens_S[sequence_T + 1]


def attend(
    q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, layout: Layout, window: bool, bias: ScoreBias | None = None
) -> Tensor:
    """See `Kernel.attend`. Both ends of the window are included, as in `sdpa`."""
    before, after = layout.wide.visible.sides(window)
    if before < 0 or after < 0:
        return varlen.attend(q_TNH, k_TNH, v_TNH, layout.wide, window, bias)
    assert bias is None, "support() refuses a bias"
    out_TNH, _ = _attention(q_TNH, k_TNH, v_TNH, layout.first_T, layout.end_T, before, after)
    return out_TNH


def attend_rotary(qkv_T3NH: Tensor, cos_TE: Tensor, sin_T2E: Tensor, layout: Layout) -> Tensor:
    """See `RotatingKernel.attend_rotary`."""
    sides = layout.wide.visible.sides(True)
    out_TNH, _, _ = _rotary_attention(qkv_T3NH, cos_TE, sin_T2E, layout.first_T, layout.end_T, *sides)
    return out_TNH


def _kernels() -> Any:
    return import_module("modernbert_train.models.attention.tile_kernels")


def _fake_outputs(q_TNH: Tensor) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = q_TNH.shape
    return q_TNH.new_empty(q_TNH.shape), q_TNH.new_empty((heads, tokens), dtype=torch.float32)


@torch.library.custom_op("modernbert_train::tile_attention", mutates_args=())
def _attention(
    q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, first_T: Tensor, end_T: Tensor, before: int, after: int
) -> tuple[Tensor, Tensor]:
    out_TNH, lse_NT, _ = _kernels().forward(q_TNH, k_TNH, v_TNH, first_T, end_T, before, after)
    return out_TNH, lse_NT


@_attention.register_fake
def _(
    q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, first_T: Tensor, end_T: Tensor, before: int, after: int
) -> tuple[Tensor, Tensor]:
    return _fake_outputs(q_TNH)


@torch.library.custom_op("modernbert_train::tile_rotary_attention", mutates_args=())
def _rotary_attention(
    qkv_T3NH: Tensor, cos_TE: Tensor, sin_T2E: Tensor, first_T: Tensor, end_T: Tensor, before: int, after: int
) -> tuple[Tensor, Tensor, Tensor]:
    outputs: tuple[Tensor, Tensor, Tensor] = _kernels().forward(
        *qkv_T3NH.unbind(1), first_T, end_T, before, after, cos_TE, sin_T2E
    )
    return outputs


@_rotary_attention.register_fake
def _(
    qkv_T3NH: Tensor, cos_TE: Tensor, sin_T2E: Tensor, first_T: Tensor, end_T: Tensor, before: int, after: int
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, _, heads, width = qkv_T3NH.shape
    return *_fake_outputs(qkv_T3NH[:, 0]), qkv_T3NH.new_empty((tokens, 2, heads, width))


@torch.library.custom_op("modernbert_train::tile_attention_backward", mutates_args=())
def _gradients(
    grad_TNH: Tensor,
    q_TNH: Tensor,
    k_TNH: Tensor,
    v_TNH: Tensor,
    out_TNH: Tensor,
    lse_NT: Tensor,
    first_T: Tensor,
    end_T: Tensor,
    before: int,
    after: int,
    cos_TE: Tensor | None = None,
    sin_T2E: Tensor | None = None,
) -> Tensor:
    grad: Tensor = _kernels().backward(
        grad_TNH, q_TNH, k_TNH, v_TNH, out_TNH, lse_NT, first_T, end_T, before, after, cos_TE, sin_T2E
    )
    return grad


@_gradients.register_fake
def _(
    grad_TNH: Tensor,
    q_TNH: Tensor,
    k_TNH: Tensor,
    v_TNH: Tensor,
    out_TNH: Tensor,
    lse_NT: Tensor,
    first_T: Tensor,
    end_T: Tensor,
    before: int,
    after: int,
    cos_TE: Tensor | None = None,
    sin_T2E: Tensor | None = None,
) -> Tensor:
    tokens, heads, width = out_TNH.shape
    return out_TNH.new_empty((tokens, 3, heads, width))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_TNH, k_TNH, v_TNH, first_T, end_T, ctx.before, ctx.after = inputs
    ctx.save_for_backward(q_TNH, k_TNH, v_TNH, *output, first_T, end_T)


def _backward(ctx: Any, grad_TNH: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    # contiguous: autograd may give an expanded gradient, and the kernels need a stride of 1 within a head
    grad_T3NH = _gradients(grad_TNH.contiguous(), *ctx.saved_tensors, ctx.before, ctx.after)
    return (*grad_T3NH.unbind(1), None, None, None, None)


def _save_rotary(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    qkv_T3NH, cos_TE, sin_T2E, first_T, end_T, ctx.before, ctx.after = inputs
    ctx.save_for_backward(qkv_T3NH, *output, first_T, end_T, cos_TE, sin_T2E)


def _rotary_backward(ctx: Any, grad_TNH: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    qkv_T3NH, out_TNH, lse_NT, qk_T2NH, first_T, end_T, cos_TE, sin_T2E = ctx.saved_tensors
    qkv_kept = (*qk_T2NH.unbind(1), qkv_T3NH[:, 2])  # q and k rotated, as the forward kernel kept them
    saved = (*qkv_kept, out_TNH, lse_NT, first_T, end_T, ctx.before, ctx.after, cos_TE, sin_T2E)
    return (_gradients(grad_TNH.contiguous(), *saved), None, None, None, None, None, None)


_attention.register_autograd(_backward, setup_context=_save)
_rotary_attention.register_autograd(_rotary_backward, setup_context=_save_rotary)
