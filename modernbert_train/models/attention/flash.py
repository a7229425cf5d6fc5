"""The flash-attn packages: CUDA, bf16 or fp16, for those who have them installed (extra `flash`).

FlashAttention-2 is the same algorithm as `varlen`, from a package that must be built; `auto` prefers torch's own. Where
FlashAttention-3 (module flash_attn_interface, Hopper) or else FlashAttention-4 (flash_attn.cute, Hopper and later) is
importable too, global layers use it: they are what long documents cost, and the newer kernels gain least in windows.
The three functions take the packed line in the same way.

Shape legend: T packed tokens, S sequences (padded), N heads, H head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modernbert_train.batch import Batch
from modernbert_train.models.attention import varlen
from modernbert_train.models.attention.varlen import gpu_support

# OSError: built for another torch or CUDA
try:
    from flash_attn import flash_attn_varlen_func as flash2
except (ImportError, OSError) as error:
    flash2: Any = None  # type: ignore[no-redef]
    MISSING: str | None = f"flash-attn is not installed or does not fit this torch ({error})"
else:
    MISSING = None
try:
    from flash_attn_interface import flash_attn_varlen_func as flash3
except (ImportError, OSError):
    flash3: Any = None  # type: ignore[no-redef]
try:
    from flash_attn.cute import flash_attn_varlen_func
except (ImportError, OSError):
    flash4: Any = None
else:
    flash4 = torch.compiler.disable(flash_attn_varlen_func)  # no custom operator: a compiler would trace into it

name = "flash"
traits = (
    "window; backward, deterministic with torch.use_deterministic_algorithms; FA3 or FA4 for global layers if there"
)


@dataclass(frozen=True)
class Layout(varlen.Layout):
    """With the function that global layers call on this device."""

    whole: Callable[..., Any]


def support(device: torch.device, dtype: torch.dtype) -> str | None:
    """See `Kernel.support`."""
    return MISSING or gpu_support(device, dtype)


def prepare(batch: Batch, half_window: int) -> Layout:
    """See `Kernel.prepare`; nothing is read back from the device."""
    borders = batch.cu_seqlens_S
    return Layout(borders, batch.max_seqlen, half_window, _for_global_layers(borders.device))


def attend(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, layout: Layout, window: bool) -> Tensor:
    """See `Kernel.attend`. Both ends of the window are included, as in `sdpa`."""
    borders, longest = layout.cu_seqlens_S, layout.max_seqlen
    options: dict[str, Any] = {"deterministic": torch.are_deterministic_algorithms_enabled()}
    if window:
        options["window_size"] = (layout.half_window, layout.half_window)
    function = flash2 if window else layout.whole
    out = function(q_TNH, k_TNH, v_TNH, borders, borders, longest, longest, **options)
    attended: Tensor = out[0] if isinstance(out, tuple) else out  # FA4 and early FA3 return the log-sum-exp too
    return attended


def _for_global_layers(device: torch.device) -> Callable[..., Any]:
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
    if flash3 is not None and major == 9:
        return flash3
    return flash4 if flash4 is not None and major >= 9 else flash2
