"""Attention kernels behind one call, and the one place where a kernel is chosen.

A kernel is a module with the five names of `Kernel`. What depends only on a microbatch (masks, borders) is made once in
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

from modernbert_train.batch import Batch
from modernbert_train.errors import ConfigError
from modernbert_train.models.attention import flash, sdpa, varlen

log = logging.getLogger(__name__)


class Kernel(Protocol):
    """What a kernel module offers."""

    name: str

    def support(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """None if the kernel serves this device and dtype of q, k and v; otherwise why it does not."""

    def prepare(self, batch: Batch, half_window: int) -> Any:
        """Everything that layers share in this microbatch; local layers see `half_window` tokens on each side."""

    def attend(self, q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, layout: Any, window: bool) -> Tensor:
        """Attention within each sequence, scaled by 1/sqrt(H), windowed if `window`; returns out_TNH."""


# in the order in which `auto` asks
KERNELS: dict[str, Kernel] = {"varlen": varlen, "flash": flash, "sdpa": sdpa}


@functools.cache
def choose_kernel(name: str, device: torch.device, dtype: torch.dtype) -> Kernel:
    """Find the kernel that a run gets.

    Args:
        name: model.attention; "auto" takes the first kernel of `KERNELS` that serves.
        device: where the model runs.
        dtype: of q, k and v, which under autocast is not that of the weights.

    Raises:
        ConfigError: the named kernel is unknown or cannot serve here.
    """
    reasons = {key: kernel.support(device, dtype) for key, kernel in KERNELS.items()}
    usable = [key for key, reason in reasons.items() if reason is None]
    chosen = usable[0] if name == "auto" else name
    if chosen not in usable:
        reason = reasons.get(name, "no such kernel")
        raise ConfigError(
            f"model.attention={name}: {reason}. Usable here: {', '.join(usable)}. Or set model.attention=auto."
        )
    log.info("model.attention=%s: using %s on %s in %s", name, chosen, device, str(dtype).removeprefix("torch."))
    return KERNELS[chosen]


def kernel_report() -> dict[str, str | None]:
    """For each kernel None if it serves the best device of this machine in its usual precision, else why not."""
    on_gpu = torch.cuda.is_available()
    device, dtype = (torch.device("cuda"), torch.bfloat16) if on_gpu else (torch.device("cpu"), torch.float32)
    return {name: kernel.support(device, dtype) for name, kernel in KERNELS.items()}
