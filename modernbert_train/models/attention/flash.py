"""The newest FlashAttention package that is installed and runs on the GPU: CUDA, bf16 or fp16.

FlashAttention-3 (module flash_attn_interface, Hopper only), else FlashAttention-4 (package flash-attn-4, Hopper and
later), else FlashAttention-2 (package flash-attn), the algorithm of `varlen`. Each keeps a compiled layer in one graph
in a different way:

- Version 4 is our custom operator, see flash4.py. compute.attention=auto takes it for global layers.
- Version 3 is called through torch's own switch, by the functions that `varlen` calls. The switch is process-wide, so
  local layers use it too, regardless of their key. compute.attention=auto takes it for all layers.
- Version 2 is a function that torch can trace. Only compute.attention=flash takes it.

Shape legend: T packed tokens, S sequences (padded), N heads, H head width.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.nn import attention as torch_attention

from modernbert_train.batch import Order, Packed
from modernbert_train.config.model import Bias
from modernbert_train.config.packages import flash_4_refusal, installed_version
from modernbert_train.core.files import errors_to, warn
from modernbert_train.models.attention import flash4, varlen
from modernbert_train.models.attention.varlen import gpu_support, without_mask
from modernbert_train.models.attention.visible import ScoreBias, Visible

MISSING: list[str] = []
flash2: Any = None
flash3: Any = None


def _installed(package: str) -> AbstractContextManager[None]:
    """Context of an import: record why a package is unusable. OSError: it is built for another torch or CUDA."""
    return errors_to(MISSING.append, ImportError, OSError, AttributeError, TypeError, before=f"{package}: ")


with _installed("flash-attn"):
    import flash_attn

    _options = (
        "cu_seqlens_q",
        "cu_seqlens_k",
        "max_seqlen_q",
        "max_seqlen_k",
        "window_size",
        "causal",
        "deterministic",
    )
    # TypeError: an older release, or another package of this name
    inspect.signature(flash_attn.flash_attn_varlen_func).bind(0, 0, 0, **dict.fromkeys(_options, 0))
    flash2 = flash_attn.flash_attn_varlen_func
with _installed("flash_attn_interface"):
    import flash_attn_interface

    # what torch's switch requires
    torch.ops.flash_attn_3.fwd, torch.ops.flash_attn_3.bwd, torch_attention.activate_flash_attention_impl  # noqa: B018
    flash3 = flash_attn_interface

name = "flash"
traits = "window; backward, deterministic with compute.deterministic; FlashAttention-3, 4 or 2"


@dataclass(frozen=True)
class Layout(varlen.Layout):
    """`varlen.Layout` with a second copy of the boundaries, for a function with separate ones for queries and keys.

    Attributes:
        of_keys_S: equal to cu_seqlens_S. Passing one tensor twice would break the graph of each compiled layer: torch
            does not trace an autograd.Function called that way.
    """

    of_keys_S: Tensor


def support(device: torch.device, dtype: torch.dtype, order: Order = "all", bias: Bias | None = None) -> str | None:
    """See `Kernel.support`."""
    if (reason := without_mask(order, bias)) is not None:
        return reason
    if flash2 is None and flash3 is None and (reason := flash_4_refusal()) is not None:
        return f"no FlashAttention is installed, or none fits this torch ({'; '.join([*MISSING, reason.rstrip('.')])})"
    if (reason := gpu_support(device, dtype)) is not None:
        return reason
    newest = _newest(device)
    if newest is None:
        if _major(device) >= 9 and (reason := _fourth_refusal()) is not None:
            return reason
        return f"the FlashAttention that is installed does not run on {torch.cuda.get_device_name(device)}"
    if newest == 4 and torch.are_deterministic_algorithms_enabled() and _major(device) not in (9, 10, 11):
        return (
            f"FlashAttention-4 lacks a deterministic backward pass on {torch.cuda.get_device_name(device)}, and "
            "compute.deterministic requires one"
        )
    return None


def prepare(packed: Packed, visible: Visible) -> varlen.Layout:
    """See `Kernel.prepare`; without a host sync."""
    device = packed.cu_seqlens_S.device
    newest = _newest(device)
    if newest == 3:
        _switch_to_third()
        return varlen.prepare(packed, visible)
    if newest == 4:
        return flash4.prepare(packed, visible)
    of_keys_S = packed.cu_seqlens_S.clone()
    torch._dynamo.maybe_mark_dynamic(of_keys_S, 0)  # mark_dynamic would raise where a graph needs a fixed size
    return Layout(*varlen.sizes(packed), visible, of_keys_S)


def attend(
    q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, layout: varlen.Layout, window: bool, bias: ScoreBias | None = None
) -> Tensor:
    """See `Kernel.attend`. Both ends of the window are included, as in `sdpa`."""
    assert bias is None, "support() refuses a bias"
    if isinstance(layout, flash4.Layout):
        return flash4.attend(q_TNH, k_TNH, v_TNH, layout, window)
    if not isinstance(layout, Layout):  # version 3: torch's switch puts it behind the functions of `varlen`
        return varlen.attend(q_TNH, k_TNH, v_TNH, layout, window)
    options: dict[str, Any] = {"deterministic": torch.are_deterministic_algorithms_enabled()}
    if window:
        options["window_size"] = layout.visible.sides(True)
    if layout.visible.order == "causal":
        options["causal"] = True
    attended: Tensor = flash2(
        q_TNH,
        k_TNH,
        v_TNH,
        cu_seqlens_q=layout.cu_seqlens_S,
        cu_seqlens_k=layout.of_keys_S,
        max_seqlen_q=layout.longest,
        max_seqlen_k=layout.longest,
        **options,
    )
    return attended


def is_third(device: torch.device) -> bool:
    """Return True if FlashAttention-3 supports the device; on Hopper it is faster than `varlen` at every length."""
    return _newest(device) == 3


def is_fourth(device: torch.device) -> bool:
    """Return True if FlashAttention-4 supports the device. Warn, once, if it is installed and unusable."""
    return _newest(device) == 4


def backend(device: torch.device, dtype: torch.dtype) -> str:
    """Return the FlashAttention that runs on a device; version 3 switches torch and returns torch's answer."""
    if is_third(device):
        _switch_to_third()
        return varlen.backend(device, dtype)
    return f"FlashAttention-{_newest(device)}"


def switch_back() -> None:
    """Let torch call its own FlashAttention-2 again, for comparing kernels in one process."""
    if flash3 is not None and torch_attention.current_flash_attention_impl() is not None:
        torch_attention.restore_flash_attention_impl()


def _switch_to_third() -> None:
    if torch_attention.current_flash_attention_impl() != "FA3":
        torch_attention.activate_flash_attention_impl("FA3")


def _newest(device: torch.device) -> int | None:
    """Return the version of the newest FlashAttention that runs on the device."""
    if flash3 is not None and _major(device) == 9:
        return 3
    if _major(device) >= 9 and _fourth_refusal() is None:
        return 4
    return None if flash2 is None else 2


@functools.cache
def _fourth_refusal() -> str | None:
    """Return why FlashAttention-4 cannot be used on a GPU that it is made for, None if it can.

    Warns if it is installed: compute.attention=auto would otherwise skip it silently.
    """
    reason = flash4.refusal()
    if reason is not None and installed_version("flash-attn-4") is not None:
        warn(f"FlashAttention-4 is installed and not used: {reason}")
    return reason


def _major(device: torch.device) -> int:
    """Return the major compute capability; 0 without CUDA."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
