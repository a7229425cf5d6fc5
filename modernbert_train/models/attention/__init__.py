"""Attention kernels behind one call, and the one place where a kernel is chosen.

A kernel is a module with the names of `Kernel`. What depends only on a microbatch (masks, boundaries) is made once in
`prepare` and shared by all layers. `sdpa` is the meaning of attention here; every other kernel is proved equal to it.
A named kernel is honoured or refused; only `auto` falls back, and its choice is logged once.

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
    """What a kernel module offers."""

    name: str
    traits: str  # what it can do, for people: windows, backward pass, determinism

    def support(
        self, device: torch.device, dtype: torch.dtype, order: Order = "all", bias: Bias | None = None
    ) -> str | None:
        """None if the kernel serves this device, dtype of q, k and v, order and perhaps bias; else why it does not."""

    def prepare(self, packed: Packed, visible: Visible) -> Any:
        """Everything that layers share in this microbatch."""

    def attend(
        self,
        q_TNH: Tensor,
        k_TNH: Tensor,
        v_TNH: Tensor,
        layout: Any,
        window: bool,
        bias: ScoreBias | None = None,
    ) -> Tensor:
        """Attention within each sequence, scaled by 1/sqrt(H), windowed if `window`; returns out_TNH.

        What a layer adds to the scores is `bias`. A token that sees nothing, which the order "given" can ask for, gets
        zeros.
        """


class RotatingKernel(Kernel, Protocol):
    """A kernel that rotates q and k of local layers itself, which saves passes over them and over their gradients."""

    def attend_rotary(self, qkv_T3NH: Tensor, cos_TE: Tensor, sin_T2E: Tensor, layout: Any) -> Tensor:
        """Attention in a local layer, where `rotated` of models/layers.py and `attend` give the same within rounding.

        The gradient of qkv_T3NH is one contiguous tensor.
        """


# in the order in which `auto` asks but for what `by_preference` puts first; `sdpa` always serves, so that `auto` never
# comes to cudnn, which nobody has timed
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
    """Find the kernel that a run gets.

    Args:
        name: of the kernel; "auto" takes the first one of `by_preference`.
        device: where the model runs.
        dtype: of q, k and v, which under autocast is not that of the weights.
        key: where the name was set, for the messages.
        order: what tokens see.
        bias: what the model adds to the scores, see `ModelConfig.score_bias`.
        local_heads: see `ModelConfig.local_heads`; None of global layers alone.

    Raises:
        ConfigError: the named kernel is unknown or cannot serve here.
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
    """The kernel of an encoder all of whose layers are global, and what it has prepared of these sequences.

    Raises:
        ConfigError: see `choose_kernel`.
    """
    name, key = asked_of_global_layers(compute)
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
    """The same of an encoder with local layers: of the global ones (True), and of those.

    Args:
        compute: how it is computed.
        packed: the sequences.
        device, dtype: see `choose_kernel`.
        half_window: see `Visible.around`.
        local_heads: see `ModelConfig.local_heads`.
    """
    visible = Visible.around(half_window, packed.order, compute.query_block)
    local = choose_kernel(compute.attention, device, dtype, order=packed.order, local_heads=local_heads)
    found = dict.fromkeys((True, False), (local, local.prepare(packed, visible)))
    name, key = asked_of_global_layers(compute)
    if name == "auto" or compute.global_attention is not None:
        wide = choose_kernel(name, device, dtype, key, packed.order)
        if wide is not local:
            found[True] = (wide, wide.prepare(packed, visible))
    return found


def asked_of_global_layers(compute: ComputeConfig) -> tuple[str, str]:
    """Return the kernel that is asked for in global layers, and the key that asks for it."""
    if compute.global_attention is None:
        return compute.attention, "compute.attention"
    return compute.global_attention, "compute.global_attention"


def by_preference(
    device: torch.device, dtype: torch.dtype, order: Order, bias: Bias | None, local_heads: int | None
) -> dict[str, str | None]:
    """Each kernel, the one first that `auto` takes, with the reason for which it cannot serve; None if it can."""
    reasons = {kind: kernel.support(device, dtype, order, bias) for kind, kernel in KERNELS.items()}
    fourth = local_heads is None and flash.is_fourth(device)  # in local layers it computes 2 to 3 times the keys seen
    first = ["flash"] * (flash.is_third(device) or fourth) + ["tiles"] * tiles.is_faster(device, local_heads)
    served = [kind for kind in first if reasons[kind] is None]
    return {kind: reasons[kind] for kind in dict.fromkeys([*served, *KERNELS])}


def with_backend(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> str:
    """The kernel's name, and on a GPU what it really calls there, where that is another's choice."""
    asked = {"varlen": varlen.backend, "flash": flash.backend, "cudnn": cudnn.backend}.get(kernel.name)
    return kernel.name if asked is None or device.type != "cuda" else f"{kernel.name} ({asked(device, dtype)})"


def kernel_report() -> dict[str, str | None]:
    """For each kernel None if it serves the best device of this machine in its usual precision, else why not."""
    on_gpu = torch.cuda.is_available()
    device, dtype = (torch.device("cuda"), torch.bfloat16) if on_gpu else (torch.device("cpu"), torch.float32)
    return {name: kernel.support(device, dtype) for name, kernel in KERNELS.items()}
