"""The flash-attn package (FlashAttention-2): CUDA, bf16 or fp16, for those who have it installed (extra `flash`).

The same algorithm as `varlen`, from a package that must be built; `auto` prefers torch's own.

Shape legend: T packed tokens, S sequences (padded), N heads, H head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modernbert_train.models.attention.varlen import Layout, gpu_support, prepare

try:
    import flash_attn
except (ImportError, OSError) as error:  # OSError: built for another torch or CUDA
    flash_attn_varlen_func: Any = None
    MISSING: str | None = f"flash-attn is not installed or does not fit this torch ({error})"
else:
    flash_attn_varlen_func = flash_attn.flash_attn_varlen_func
    MISSING = None

name = "flash"
__all__ = ["MISSING", "attend", "name", "prepare", "support"]


def support(device: torch.device, dtype: torch.dtype) -> str | None:
    """See `Kernel.support`."""
    return MISSING or gpu_support(device, dtype)


def attend(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, layout: Layout, window: bool) -> Tensor:
    """See `Kernel.attend`. Both ends of the window are included, as in `sdpa`."""
    side = layout.half_window if window else -1
    borders, longest = layout.cu_seqlens_S, layout.max_seqlen
    out: Tensor = flash_attn_varlen_func(
        q_TNH, k_TNH, v_TNH, borders, borders, longest, longest, window_size=(side, side)
    )
    return out
