"""What takes FlashAttention's place where it cannot be installed: its arguments, what it asks of them, and no more.

Names, order and defaults are those of flash-attn 2.8 and of flash_attn_interface 3.0. What these do not take would be
refused there too. The work is that of torch's own function, which has the same shapes forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn


def flash2(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Any = None,
) -> Tensor:  # fmt: skip
    """flash_attn.flash_attn_varlen_func."""
    return _attend((q, k, v), (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), window_size, causal)


def flash3(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    seqused_q: Any = None, seqused_k: Any = None, softmax_scale: float | None = None, causal: bool = False,
    qv: Any = None, q_descale: Any = None, k_descale: Any = None, v_descale: Any = None,
    window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Tensor:  # fmt: skip
    """flash_attn_interface.flash_attn_varlen_func."""
    return _attend((q, k, v), (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), window_size, causal)


def _attend(
    qkv: tuple[Tensor, ...],
    boundaries: tuple[Tensor, ...],
    longest: tuple[int, ...],
    window: tuple[int, int],
    causal: bool,
) -> Tensor:
    for each in qkv:
        if each.dtype not in (torch.bfloat16, torch.float16):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        if not each.is_cuda or each.dim() != 3 or each.stride(-1) != 1 or each.shape[-1] % 8 or each.shape[-1] > 256:
            raise RuntimeError("Input tensor must be on a CUDA device, of heads that lie together, of 8 to 256")
    for each in boundaries:
        if each.dtype != torch.int32 or not each.is_cuda or not each.is_contiguous():
            raise RuntimeError("cu_seqlens must have dtype int32, on a CUDA device, contiguous")
    assert all(type(each) is int for each in longest)
    window = (window[0], 0) if causal else window
    out: Tensor = varlen_attn(*qkv, *boundaries, *longest, window_size=window)
    return out
