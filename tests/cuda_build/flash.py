"""Stand-ins for FlashAttention where it cannot be installed, with its structure, arguments and checks.

flash2 is a function of a package: an autograd.Function around two custom operators, called with the boundaries of
queries and keys, as in flash-attn 2.8. flash3 is an extension with the operators `flash_attn_3::fwd` and `bwd`, called
by torch's own switch, as in flash_attn_interface 3.0. Arguments that these reject would be rejected there too. flash2
calls torch's own function; flash3 writes its outputs and computes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from modernbert_train.models.attention import choose_kernel, flash

Both = tuple[Tensor, Tensor]


@contextmanager
def installed(version: str) -> Iterator[None]:
    """Pretend that only flash2 or flash3 is installed; flash4: the real one; any other name: none of them."""
    choose_kernel.cache_clear()
    there = {"flash2": flash2, "flash3": _PACKAGE}
    if version == "flash3":
        sys.modules[_PACKAGE.__name__] = _PACKAGE  # torch's switch imports it
    with (
        patch.object(flash, "flash2", there["flash2"] if version == "flash2" else None),
        patch.object(flash, "flash3", there["flash3"] if version == "flash3" else None),
        nullcontext() if version == "flash4" else patch.object(flash, "_fourth_refusal", lambda: "see flash4.py"),
    ):
        yield
        flash.switch_back()
    # not by patch.dict, which would also remove modules imported meanwhile: Inductor fails if it is imported twice
    sys.modules.pop(_PACKAGE.__name__, None)
    choose_kernel.cache_clear()


def flash2(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Any = None,
) -> Tensor:  # fmt: skip
    """flash_attn.flash_attn_varlen_func."""
    window = (window_size[0], 0) if causal else window_size
    out: Tensor = _Second.apply(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window)
    return out


class _Second(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, window: tuple[int, int],
    ) -> Tensor:  # fmt: skip
        out, lse = _forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *window)
        ctx.save_for_backward(q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse)
        ctx.longest, ctx.window = (max_seqlen_q, max_seqlen_k), window
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = _backward(grad, *ctx.saved_tensors, *ctx.longest, *ctx.window)
        return *grads, None, None, None, None, None


@torch.library.custom_op("flash_attn::_flash_attn_varlen_forward", mutates_args=(), device_types="cuda")
def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    left: int, right: int,
) -> Both:  # fmt: skip
    _demand((q, k, v), (cu_seqlens_q, cu_seqlens_k))
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, False, return_debug_mask=False,
        window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return out, lse


@torch.library.custom_op("flash_attn::_flash_attn_varlen_backward", mutates_args=(), device_types="cuda")
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, out: Tensor, lse: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, left: int, right: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, False, state, state,
        window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return grads


@_forward.register_fake
def _forward_shapes(q: Tensor, *_: Any) -> Both:
    return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@_backward.register_fake
def _backward_shapes(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _demand(qkv: tuple[Tensor, ...], boundaries: tuple[Tensor, ...]) -> None:
    for each in qkv:
        if each.dtype not in (torch.bfloat16, torch.float16):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        if not each.is_cuda or each.dim() != 3 or each.stride(-1) != 1 or each.shape[-1] % 8 or each.shape[-1] > 256:
            raise RuntimeError("Input tensor must be on a CUDA device, of heads that lie together, of 8 to 256")
    for each in boundaries:
        if each.dtype != torch.int32 or not each.is_cuda or not each.is_contiguous():
            raise RuntimeError("cu_seqlens must have dtype int32, on a CUDA device, contiguous")


_THIRD = torch.library.Library("flash_attn_3", "DEF")
_THIRD.define(
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor(out!)? out, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, "
    "int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, "
    "Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, "
    "Tensor? v_descale, float? softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
    "int attention_chunk, float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, "
    "bool? pack_gqa, int sm_margin) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)
_THIRD.define(
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq, Tensor(dk!)? dk, "
    "Tensor(dv!)? dv, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "int? max_seqlen_q, int? max_seqlen_k, float? softmax_scale, bool is_causal, int window_size_left, "
    "int window_size_right, float softcap, bool deterministic, int sm_margin) -> (Tensor, Tensor, Tensor, Tensor)"
)
WINDOWS: set[tuple[str, int, int]] = set()  # arguments of flash3: (fwd or bwd, left, right)


@torch.library.impl(_THIRD, "fwd", "CUDA")
def _third_forward(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _demand((q, k, v), more[4:6])
    WINDOWS.add(("fwd", *more[22:24]))
    lse = torch.zeros((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    nothing = torch.empty(0, device=q.device)
    return torch.zeros_like(q), lse, nothing, nothing


@torch.library.impl(_THIRD, "bwd", "CUDA")
def _third_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *more: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _demand((dout, q, k, v, out), (cu_seqlens_q, cu_seqlens_k))
    WINDOWS.add(("bwd", *more[6:8]))
    for grad, of in ((dq, q), (dk, k), (dv, v)):
        grad.copy_(of)
    return dq, dk, dv, softmax_lse


_PACKAGE = ModuleType("flash_attn_interface")
