"""Attention kernels behind one call, and the one place where a kernel is chosen.

A kernel is a module with the attributes of `Kernel`. `prepare` computes what depends on a microbatch only (masks,
boundaries) once for all layers. `sdpa` is the reference; tests compare every other kernel with it. A named kernel is
used or refused; only `auto` falls back, and its choice is logged once.

Shape legend: T packed tokens, N heads, H head width.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Protocol

import torch
from torch import Tensor

from modernbert_train.batch import Order, Packed
from modernbert_train.config.model import Bias
from modernbert_train.config.schema import ComputeConfig
from modernbert_train.errors import ConfigError
from modernbert_train.models.attention import cudnn, flash, flex, sdpa, tiles, varlen
from modernbert_train.models.attention.visible import ScoreBias, Visible

log = logging.getLogger(__name__)


class Kernel(Protocol):
    """Interface of a kernel module."""

    name: str
    traits: str  # capabilities, for display: windows, backward pass, determinism

    def support(
        self, device: torch.device, dtype: torch.dtype, order: Order = "all", bias: Bias | None = None
    ) -> str | None:
        """Return None if the kernel supports this device, dtype of q, k and v, order and bias; else the reason."""

    def prepare(self, packed: Packed, visible: Visible) -> Any:
        """Return the layout that all layers share in this microbatch."""

    def attend(
        self,
        q_TNH: Tensor,
        k_TNH: Tensor,
        v_TNH: Tensor,
        layout: Any,
        window: bool,
        bias: ScoreBias | None = None,
    ) -> Tensor:
        """Compute attention within each sequence, scaled by 1/sqrt(H), windowed if `window`; return out_TNH.

        `bias` is added to the scores. A token that sees no key, which the order "given" allows, gets zeros.
        """


class RotatingKernel(Kernel, Protocol):
    """A kernel that applies RoPE to q and k of local layers itself; this saves passes over them and their gradients."""

    def attend_rotary(self, qkv_T3NH: Tensor, cos_TE: Tensor, sin_T2E: Tensor, layout: Any) -> Tensor:
        """Apply RoPE, then attend within the window; equals `rotated` (models/layers.py) and `attend` within rounding.

        The gradient of qkv_T3NH is one contiguous tensor.
        """


# `auto` tries them in this order, after those that `by_preference` moves to the front. `sdpa` supports everything, so
# `auto` never reaches cudnn, which is unmeasured
KERNELS: dict[str, Kernel] = {
    "varlen": varlen,
    "flash": flash,
    "flex": flex,
    "sdpa": sdpa,
    "tiles": tiles,
    "cudnn": cudnn,
}


@functools.cache
def choose_kernel(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    key: str = "compute.attention",
    order: Order = "all",
    bias: Bias | None = None,
    local_heads: int | None = None,
) -> Kernel:
    """Return the kernel for a run.

    Args:
        name: of the kernel; "auto" takes the first usable one of `by_preference`.
        device: where the model runs.
        dtype: of q, k and v; under autocast it differs from the weights'.
        key: the key that set the name, for messages.
        order: which tokens see each other.
        bias: the model's bias on the scores, see `ModelConfig.score_bias`.
        local_heads: see `ModelConfig.local_heads`; None if there are global layers only.

    Raises:
        ConfigError: the named kernel is unknown or unusable here.
    """
    reasons = by_preference(device, dtype, order, bias, local_heads)
    usable = [kind for kind, reason in reasons.items() if reason is None]
    chosen = usable[0] if name == "auto" else name
    if chosen not in usable:
        reason = reasons.get(name, "no such kernel")
        raise ConfigError(f"{key}={name}: {reason}. Usable here: {', '.join(usable)}. Or set {key}=auto.")
    log.info("%s=%s: using %s on %s in %s", key, name, chosen, device, str(dtype).removeprefix("torch."))
    return KERNELS[chosen]


def for_all_layers(
    compute: ComputeConfig, packed: Packed, device: torch.device, dtype: torch.dtype, bias: Bias | None = None
) -> tuple[Kernel, Any]:
    """Return the kernel of an encoder that has global layers only, and its layout for these sequences.

    Raises:
        ConfigError: see `choose_kernel`.
    """
    name, key = configured_for_global_layers(compute)
    kernel = choose_kernel(name, device, dtype, key, packed.order, bias)
    return kernel, kernel.prepare(packed, Visible(order=packed.order))


def for_each_reach(
    compute: ComputeConfig,
    packed: Packed,
    device: torch.device,
    dtype: torch.dtype,
    half_window: int,
    local_heads: int | None,
) -> dict[bool, tuple[Kernel, Any]]:
    """Return kernel and layout of global layers (True) and of local layers (False).

    Args:
        compute: names the kernels.
        packed: the sequences.
        device, dtype: see `choose_kernel`.
        half_window: see `Visible.around`.
        local_heads: see `ModelConfig.local_heads`.
    """
    visible = Visible.around(half_window, packed.order, compute.query_block)
    local = choose_kernel(compute.attention, device, dtype, order=packed.order, local_heads=local_heads)
    kernels = dict.fromkeys((True, False), (local, local.prepare(packed, visible)))
    name, key = configured_for_global_layers(compute)
    if name == "auto" or compute.global_attention is not None:
        wide = choose_kernel(name, device, dtype, key, packed.order)
        if wide is not local:
            kernels[True] = (wide, wide.prepare(packed, visible))
    return kernels


def configured_for_global_layers(compute: ComputeConfig) -> tuple[str, str]:
    """Return the kernel that is configured for global layers, and the key that sets it."""
    if compute.global_attention is None:
        return compute.attention, "compute.attention"
    return compute.global_attention, "compute.global_attention"


def by_preference(
    device: torch.device, dtype: torch.dtype, order: Order, bias: Bias | None, local_heads: int | None
) -> dict[str, str | None]:
    """Return why each kernel is unusable (None: usable), in the order of preference of `auto`."""
    reasons = {kind: kernel.support(device, dtype, order, bias) for kind, kernel in KERNELS.items()}
    fourth = local_heads is None and flash.is_fourth(device)  # in local layers it computes 2 to 3 times the keys seen
    first = ["flash"] * (flash.is_third(device) or fourth) + ["tiles"] * tiles.is_faster(device, local_heads)
    served = [kind for kind in first if reasons[kind] is None]
    return {kind: reasons[kind] for kind in dict.fromkeys([*served, *KERNELS])}


def with_backend(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> str:
    """Return the kernel's name, and on a GPU the backend that it calls, where that depends on the installation."""
    backend_of = {"varlen": varlen.backend, "flash": flash.backend, "cudnn": cudnn.backend}.get(kernel.name)
    return (
        kernel.name if backend_of is None or device.type != "cuda" else f"{kernel.name} ({backend_of(device, dtype)})"
    )


def kernel_report() -> dict[str, str | None]:
    """Return why each kernel cannot run on this machine's best device in its usual precision; None if it can."""
    on_gpu = torch.cuda.is_available()
    device, dtype = (torch.device("cuda"), torch.bfloat16) if on_gpu else (torch.device("cpu"), torch.float32)
    return {name: kernel.support(device, dtype) for name, kernel in KERNELS.items()}
