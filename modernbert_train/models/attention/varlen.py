"""FlashAttention-2 from torch itself, with boundaries and windows: CUDA, bf16 or fp16, nothing to install.

`torch.nn.attention.varlen_attn` chooses between FlashAttention and cuDNN by rules that change with each release: up to
2.13 it never takes cuDNN, 2.14 takes it on Hopper and Blackwell regardless of SDPA's switches, 2.15 follows those
switches, which are process-wide. So the operators below call torch's flash functions by name, the same on every torch
since 2.11.

`flash` may have switched torch to FlashAttention-3. The switch replaces these functions in torch's dispatcher for the
whole process, so this kernel then calls version 3 too.

Shape legend: T packed tokens, S sequences (padded), N heads, H head width, L longest sequence plus one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch._dynamo
from torch import Tensor
from torch.nn import attention as torch_attention

from modernbert_train.batch import Order, Packed
from modernbert_train.config.model import Bias
from modernbert_train.core.versions import OLDEST, TESTED
from modernbert_train.models.attention.operator import operator
from modernbert_train.models.attention.visible import ScoreBias, Visible

name = "varlen"
traits = "window; backward, deterministic with compute.deterministic"


@dataclass(frozen=True)
class Layout:
    """The sizes that follow the documents; both are dynamic dimensions, so compiled layers are not recompiled.

    Attributes:
        cu_seqlens_S: boundaries, on the device.
        reach_L0: an empty tensor with one row more than the longest sequence has tokens. An int would be baked into the
            graph; without the extra row, its size could equal S, and torch would treat both as one dimension.
        visible: as passed to `prepare`.
    """

    cu_seqlens_S: Tensor
    reach_L0: Tensor
    visible: Visible

    @property
    def longest(self) -> int:
        """Upper bound of the sequences' lengths; kernels launch blocks for this many tokens of each."""
        return self.reach_L0.shape[0] - 1


def support(device: torch.device, dtype: torch.dtype, order: Order = "all", bias: Bias | None = None) -> str | None:
    """See `Kernel.support`."""
    return without_mask(order, bias) or gpu_support(device, dtype) or missing_in_torch(_FORWARD, _BACKWARD)


# functions of torch that this kernel calls, with their arguments
_FORWARD = (
    "_flash_attention_forward",
    *("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"),
    *("return_debug_mask", "window_size_left", "window_size_right"),
)
_BACKWARD = (
    "_flash_attention_backward",
    *("grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p"),
    *("is_causal", "rng_state", "unused", "window_size_left", "window_size_right"),
)


@functools.cache
def missing_in_torch(*functions: tuple[str, ...], oldest: str = OLDEST) -> str | None:
    """Return why the installed torch lacks some of its functions, with a remedy; None if all are there.

    Args:
        functions: for each, its name in torch.ops.aten and the arguments that it must accept.
        oldest: first torch with these functions, for the remedy.
    """
    remedy = f"install a torch from {oldest} to {TESTED[-1]} of pytorch.org"
    for name, *arguments in functions:
        schema = getattr(getattr(getattr(torch.ops.aten, name, None), "default", None), "_schema", None)
        takes = set() if schema is None else {argument.name for argument in schema.arguments}
        if lacks := [argument for argument in arguments if argument not in takes]:
            problem = f"has no {name}" if schema is None else f"has a {name} without {', '.join(lacks)}"
            return f"torch {torch.__version__} {problem}: {remedy}"
    if not torch.backends.cuda.is_flash_attention_available():
        return f"torch {torch.__version__} was built without FlashAttention: {remedy}"
    return None


def without_mask(order: Order, bias: Bias | None) -> str | None:
    """Return why a kernel with boundaries and a window only cannot compute this order or bias; None if it can."""
    if order == "given":
        return "it cannot compute an order given by ranks and limits, which the objective needs"
    return "it cannot add a bias to the scores, which the model needs" if bias else None


def gpu_support(
    device: torch.device,
    dtype: torch.dtype,
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16),
) -> str | None:
    """Return why this device or dtype cannot run a GPU kernel of this package; None if it can."""
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type}"
    if not torch.cuda.is_available():
        return "no CUDA device is visible"
    if dtype not in dtypes:
        names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
        return f"it computes in {' or '.join(names[d] for d in dtypes)}, not {str(dtype).removeprefix('torch.')}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"it needs compute capability 8.0, and {torch.cuda.get_device_name(device)} has less"
    return None


def prepare(packed: Packed, visible: Visible) -> Layout:
    """See `Kernel.prepare`; without a host sync."""
    return Layout(*sizes(packed), visible)


def sizes(packed: Packed) -> tuple[Tensor, Tensor]:
    """Return the first two fields of `Layout`, marked dynamic for compiled layers."""
    longest = packed.max_seqlen if packed.longest is None else packed.longest
    both = packed.cu_seqlens_S, packed.cu_seqlens_S.new_empty((longest + 1, 0))  # 0 columns: only its length is used
    for each in both:
        torch._dynamo.maybe_mark_dynamic(each, 0)
    return both


def backend(device: torch.device, dtype: torch.dtype) -> str:
    """Return the version of FlashAttention behind torch's flash functions."""
    active = getattr(torch_attention, "current_flash_attention_impl", lambda: None)()
    if active is not None:
        return f"FlashAttention-{active.removeprefix('FA')}"
    return "FlashAttention-2" if torch.version.hip is None else "FlashAttention by AOTriton"


def attend(
    q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, layout: Layout, window: bool, bias: ScoreBias | None = None
) -> Tensor:
    """See `Kernel.attend`. Both ends of the window are included, as in `sdpa`."""
    assert bias is None, "support() refuses a bias"
    before, after = layout.visible.sides(window)
    out_TNH, _ = _attention(q_TNH, k_TNH, v_TNH, layout.cu_seqlens_S, layout.longest, before, after)
    return out_TNH


def _forward(
    q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, cu_seqlens_S: Tensor, longest: int, before: int, after: int
) -> tuple[Tensor, Tensor]:
    out_TNH, lse_NT, *_ = torch.ops.aten._flash_attention_forward(
        query=q_TNH,
        key=k_TNH,
        value=v_TNH,
        cum_seq_q=cu_seqlens_S,
        cum_seq_k=cu_seqlens_S,
        max_q=longest,
        max_k=longest,
        dropout_p=0.0,
        is_causal=is_causal(before, after),
        return_debug_mask=False,
        window_size_left=before,
        window_size_right=after,
    )
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
    # only read with dropout; torch itself passes this shape and dtype
    random_state = torch.empty(2, dtype=torch.uint64, device=q_TNH.device)
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad_out=grad_TNH,
        query=q_TNH,
        key=k_TNH,
        value=v_TNH,
        out=out_TNH,
        logsumexp=lse_NT,
        cum_seq_q=cu_seqlens_S,
        cum_seq_k=cu_seqlens_S,
        max_q=longest,
        max_k=longest,
        dropout_p=0.0,
        is_causal=is_causal(before, after),
        rng_state=random_state,
        unused=random_state,
        window_size_left=before,
        window_size_right=after,
    )
    return grads


def is_causal(before: int, after: int) -> bool:
    """True for plain causal attention, for which FlashAttention has a separate kernel."""
    return before < 0 and after == 0


_attention, _gradients = operator("varlen_attention", _forward, _backward)
