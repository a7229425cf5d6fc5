"""The newest FlashAttention that is installed and runs on the GPU: CUDA, bf16 or fp16, for those who have a package.

FlashAttention-3 (module flash_attn_interface, Hopper only), else FlashAttention-4 (package flash-attn-4, Hopper and
later), else FlashAttention-2 (package flash-attn), which is the algorithm of `varlen`. compute.attention=auto takes the
third of its own accord. The newer ones gain most in global layers on long documents; compute.attention=varlen with
compute.global_attention=flash gives them those alone.

The third serves through torch's own switch, as what `varlen` calls: its package's function would break the graph of
each compiled layer. The switch is the process's, so local layers have it too, however they are asked for.

Shape legend: T packed tokens, S sequences (padded), N heads, H head width.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.nn import attention as torch_attention

from modernbert_train.batch import Order, Packed
from modernbert_train.config.model import Bias
from modernbert_train.core.files import errors_to
from modernbert_train.models.attention import varlen
from modernbert_train.models.attention.varlen import gpu_support, without_mask
from modernbert_train.models.attention.visible import ScoreBias, Visible

MISSING: list[str] = []
flash2: Any = None
flash3: Any = None
flash4: Any = None


def _installed(package: str) -> AbstractContextManager[None]:
    """Within it a package is looked for; OSError: it is built for another torch or CUDA."""
    return errors_to(MISSING.append, ImportError, OSError, AttributeError, before=f"{package}: ")


with _installed("flash-attn"):
    import flash_attn

    flash2 = flash_attn.flash_attn_varlen_func
with _installed("flash_attn_interface"):
    import flash_attn_interface

    # what torch's switch wants of it
    torch.ops.flash_attn_3.fwd, torch.ops.flash_attn_3.bwd, torch_attention.activate_flash_attention_impl  # noqa: B018
    flash3 = flash_attn_interface
with _installed("flash-attn-4"):
    from flash_attn.cute import flash_attn_varlen_func

    flash4 = torch.compiler.disable(flash_attn_varlen_func)  # no custom operator: a compiler would trace into it

name = "flash"
traits = "window; backward, deterministic with compute.deterministic; FlashAttention-3, 4 or 2"


@dataclass(frozen=True)
class Layout(varlen.Layout):
    """With the boundaries a second time, for a function that is given both queries' and keys'.

    Attributes:
        function: that serves on this device.
        of_keys_S: equal to cu_seqlens_S: one tensor twice would break the graph of each compiled layer, as torch traces
            no autograd.Function that is given it.
    """

    function: Callable[..., Any]
    of_keys_S: Tensor


def support(device: torch.device, dtype: torch.dtype, order: Order = "all", bias: Bias | None = None) -> str | None:
    """See `Kernel.support`."""
    if (reason := without_mask(order, bias)) is not None:
        return reason
    if flash2 is None and flash3 is None and flash4 is None:
        return f"no FlashAttention is installed, or none fits this torch ({'; '.join(MISSING)})"
    if (reason := gpu_support(device, dtype)) is not None:
        return reason
    if _newest(device) is None:
        return f"the FlashAttention that is installed does not run on {torch.cuda.get_device_name(device)}"
    if torch.are_deterministic_algorithms_enabled() and _newest(device) is flash4 and _major(device) not in (10, 11):
        return (
            "FlashAttention-4 has a deterministic backward pass on Blackwell alone, and compute.deterministic asks "
            "for one"
        )
    return None


def prepare(packed: Packed, visible: Visible) -> varlen.Layout:
    """See `Kernel.prepare`; nothing is read back from the device."""
    device = packed.cu_seqlens_S.device
    if is_third(device):
        _switch_to_third()
        return varlen.prepare(packed, visible)
    function = _newest(device)
    assert function is not None, "asked for without support()"
    of_keys_S = packed.cu_seqlens_S.clone()
    torch._dynamo.maybe_mark_dynamic(of_keys_S, 0)
    return Layout(*varlen.sizes(packed), visible, function, of_keys_S)


def attend(
    q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, layout: varlen.Layout, window: bool, bias: ScoreBias | None = None
) -> Tensor:
    """See `Kernel.attend`. Both ends of the window are included, as in `sdpa`."""
    if not isinstance(layout, Layout):
        return varlen.attend(q_TNH, k_TNH, v_TNH, layout, window, bias)
    assert bias is None, "asked for without support()"
    longest = layout.longest
    options: dict[str, Any] = {"deterministic": torch.are_deterministic_algorithms_enabled()}
    if window:
        options["window_size"] = layout.visible.sides(True)
    if layout.visible.order == "causal":
        options["causal"] = True
    out = layout.function(  # by name: version 4 has another argument where 2 and 3 have the boundaries
        q_TNH,
        k_TNH,
        v_TNH,
        cu_seqlens_q=layout.cu_seqlens_S,
        cu_seqlens_k=layout.of_keys_S,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        **options,
    )
    attended: Tensor = out[0] if isinstance(out, tuple) else out  # FA4 returns the log-sum-exp too
    return attended


def is_third(device: torch.device) -> bool:
    """Whether it is FlashAttention-3 that serves a device, which on Hopper is faster than `varlen` at every length."""
    return flash3 is not None and _newest(device) is flash3


def backend(device: torch.device, dtype: torch.dtype) -> str:
    """Which FlashAttention serves a device; of the third, what torch says once it is switched to it."""
    if is_third(device):
        _switch_to_third()
        return varlen.backend(device, dtype)
    return "FlashAttention-4" if _newest(device) is flash4 else "FlashAttention-2"


def switch_back() -> None:
    """Have torch call its own FlashAttention-2 again: where kernels are compared in one process."""
    if flash3 is not None and torch_attention.current_flash_attention_impl() is not None:
        torch_attention.restore_flash_attention_impl()


def _switch_to_third() -> None:
    if torch_attention.current_flash_attention_impl() != "FA3":
        torch_attention.activate_flash_attention_impl("FA3")


def _newest(device: torch.device) -> Any:
    if flash3 is not None and _major(device) == 9:
        return flash3
    return flash4 if flash4 is not None and _major(device) >= 9 else flash2


def _major(device: torch.device) -> int:
    """Of its compute capability; 0 where there is none."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
