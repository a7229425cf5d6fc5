"""FlashAttention-4 (package flash-attn-4) as one custom operator: Hopper and later, bf16 or fp16.

torch.compile cannot trace the package's own function, which would break the graph of every compiled layer; our custom
operator is one node of that graph, see operator.py. The package compiles its kernels on first use, without a C
compiler. A process compares each kind of call with the reference attention before it uses it, since earlier releases
returned wrong gradients without an error.

Shape legend: T packed tokens, S sequences (padded), N heads, H head width.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modernbert_train.batch import Packed
from modernbert_train.config.packages import FLASH_4_INSTALL, flash_4_refusal, installed_version
from modernbert_train.core.files import reason_of
from modernbert_train.errors import ConfigError
from modernbert_train.models.attention import varlen
from modernbert_train.models.attention.operator import operator
from modernbert_train.models.attention.visible import Visible
from modernbert_train.models.attention.written_out import LENGTHS, TOLERANCES, differences, small_batch, written_out

log = logging.getLogger(__name__)

_MANY = 256  # above this many sequences the package uses other kernels, which look up a block's sequence in a table


@dataclass(frozen=True)
class Layout(varlen.Layout):
    """The layout of `varlen`, as a separate class for `flash.attend` to recognise."""


def prepare(packed: Packed, visible: Visible) -> Layout:
    """See `Kernel.prepare`; without a host sync."""
    return Layout(*varlen.sizes(packed), visible)


def attend(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, layout: Layout, window: bool) -> Tensor:
    """See `Kernel.attend`. Both ends of the window are included, as in `sdpa`."""
    before, after = layout.visible.sides(window)
    out_TNH, _ = _attention(q_TNH, k_TNH, v_TNH, layout.cu_seqlens_S, layout.longest, before, after)
    return out_TNH


@functools.cache
def refusal() -> str | None:
    """Return why the installed package cannot be used, None if it can. Imports it, which takes seconds."""
    try:
        load()
    except Exception as error:  # a CuTe that does not fit torch, CUDA or Python raises errors of any type
        return reason_of(error)
    return None


@functools.cache
def load() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Import the package's forward and backward functions, and check that they take the arguments passed here.

    Raises:
        ImportError: the package is missing, too old, or has other functions.
    """
    if (reason := flash_4_refusal()) is not None:
        raise ImportError(reason)
    from flash_attn.cute import interface

    options = _options(None, 0, -1, -1)
    try:
        forward, backward = interface._flash_attn_fwd, interface._flash_attn_bwd
        inspect.signature(forward).bind(q=0, k=0, v=0, return_lse=True, **options)
        to_fill = {"dq": 0, "dk": 0, "dv": 0}
        inspect.signature(backward).bind(q=0, k=0, v=0, out=0, dout=0, lse=0, deterministic=True, **to_fill, **options)
    except (AttributeError, TypeError, ValueError) as error:
        raise ImportError(
            f"flash-attn-4 {installed_version('flash-attn-4')} has other functions than this program calls ({error}). "
            f"Install a release that fits: {FLASH_4_INSTALL}"
        ) from error
    return forward, backward


def _options(cu_seqlens_S: Tensor | None, longest: int, before: int, after: int) -> dict[str, Any]:
    """Return the arguments that both functions take."""
    return {
        "cu_seqlens_q": cu_seqlens_S,
        "cu_seqlens_k": cu_seqlens_S,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        # None and not -1: next to a limit on the other side, -1 would be read as a window of no token
        "window_size_left": None if before < 0 else before,
        "window_size_right": None if after < 0 else after,
    }


def _forward(
    q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, cu_seqlens_S: Tensor, longest: int, before: int, after: int
) -> tuple[Tensor, Tensor]:
    options = _options(cu_seqlens_S, longest, before, after)
    out_TNH, lse_NT, *_ = load()[0](q=q_TNH, k=k_TNH, v=v_TNH, return_lse=True, **options)
    return out_TNH, lse_NT


def _backward(
    grad_TNH: Tensor,
    q_TNH: Tensor,
    k_TNH: Tensor,
    v_TNH: Tensor,
    out_TNH: Tensor,
    lse_NT: Tensor,
    cu_seqlens_S: Tensor,
    longest: int,
    before: int,
    after: int,
) -> tuple[Tensor, Tensor, Tensor]:
    # allocate them here: the package's own gradients follow the strides of q, or of its copy
    dq_TNH, dk_TNH, dv_TNH = (q_TNH.new_empty(q_TNH.shape) for _ in range(3))
    load()[1](
        q=q_TNH,
        k=k_TNH,
        v=v_TNH,
        out=out_TNH,
        dout=grad_TNH,
        lse=lse_NT,
        dq=dq_TNH,
        dk=dk_TNH,
        dv=dv_TNH,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **_options(cu_seqlens_S, longest, before, after),
    )
    return dq_TNH, dk_TNH, dv_TNH


@functools.cache
def _prove(
    device: torch.device, dtype: torch.dtype, width: int, before: int, after: int, deterministic: bool, many: bool
) -> None:
    """Compare one kind of call with a plain fp64 implementation, on a small random case.

    Args:
        device: the GPU.
        dtype: of q, k and v.
        width: of a head.
        before, after: tokens visible on each side; -1 for all.
        deterministic: True if the process requires deterministic algorithms; only part of the cache key.
        many: True for more than 256 sequences.

    Raises:
        ConfigError: the output or a gradient differs by more than rounding, or the kernels do not run here.
    """
    batch = small_batch(empty=_MANY + 1 if many else 1).to(device)
    generator = torch.Generator().manual_seed(0)
    qkvg = torch.randn(sum(LENGTHS), 4, 2, width, generator=generator).to(dtype)
    q_TNH, k_TNH, v_TNH, grad_TNH = qkvg.to(device).unbind(1)
    where = (batch.cu_seqlens_S, batch.max_seqlen, before, after)
    on = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    release, precision = installed_version("flash-attn-4"), str(dtype).removeprefix("torch.")
    who = f"FlashAttention-4 (flash-attn-4 {release}) on {on}, with heads of {width} in {precision}"
    remedy = (
        "Set compute.attention=varlen and compute.global_attention=varlen, or install another release of flash-attn-4."
    )
    try:
        out_TNH, lse_NT = _forward(q_TNH, k_TNH, v_TNH, *where)
        grads = _backward(grad_TNH.contiguous(), q_TNH, k_TNH, v_TNH, out_TNH, lse_NT, *where)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # a fault of the device, not of the package
    except Exception as error:
        raise ConfigError(f"{who}, does not run: {reason_of(error)}. {remedy}") from error
    exact = written_out(*qkvg[:, :3].double().unbind(1), grad_TNH=qkvg[:, 3].double(), sides=(before, after))
    errors = dict(zip(("the output", "dq", "dk", "dv"), differences([out_TNH, *grads], exact), strict=True))
    numbers = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    tolerance = TOLERANCES[dtype]
    if not all(error <= tolerance for error in errors.values()):
        raise ConfigError(
            f"{who}, computes something else than attention: relative errors of {numbers}, where {tolerance:.0e} is "
            f"rounding. {remedy}"
        )
    log.info("%s: relative errors of %s, compared with fp64", who, numbers)


def _forward_proved(
    q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, cu_seqlens_S: Tensor, longest: int, before: int, after: int
) -> tuple[Tensor, Tensor]:
    deterministic, many = torch.are_deterministic_algorithms_enabled(), len(cu_seqlens_S) - 1 > _MANY
    _prove(q_TNH.device, q_TNH.dtype, q_TNH.shape[-1], before, after, deterministic, many)
    return _forward(q_TNH, k_TNH, v_TNH, cu_seqlens_S, longest, before, after)


_attention, _gradients = operator("flash_attention_4", _forward_proved, _backward)
