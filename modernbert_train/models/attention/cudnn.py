"""Global layers by cuDNN with boundaries, local layers by `varlen`: Hopper and Blackwell, bf16 or fp16.

compute.attention=auto never takes it, since its speed is unmeasured. Three properties of torch's cuDNN functions, seen
on torch 2.14.1 and 2.15.0, shape this file:

- They build and cache one cuDNN graph for each number of sequences and longest sequence. So the longest sequence is
  rounded up to an eighth of the row. Before 2.14 every call built a graph (pytorch pull request 191576), and the
  backward pass mistook the head's width for the longest sequence (186142).
- The backward pass allocates sequences x longest x heads x width fp32 values, for any number of tokens.
- Empty sequences, which pad `cu_seqlens`, give NaN before cuDNN 9.25 (cudnn-frontend issue 943).

Shape legend: T packed tokens, S sequences (padded), N heads, H head width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from modernbert_train.batch import Order, Packed
from modernbert_train.config.model import CUDNN_HEADS, Bias
from modernbert_train.models.attention import varlen
from modernbert_train.models.attention.operator import operator
from modernbert_train.models.attention.visible import ScoreBias, Visible

MIN_CUDNN = 92_500  # 9.25.0
_SHORTEST = 256  # torch 2.14 refuses cuDNN for sequences of at most 128 tokens
_LENGTHS = 8  # distinct values of the longest sequence; each needs its own graphs

name = "cudnn"
traits = "global layers, window by varlen; backward, not deterministic; unmeasured"


@dataclass(frozen=True)
class Layout:
    """Boundaries of one microbatch, shared by all layers.

    Attributes:
        whole: for global layers, with the longest sequence rounded up.
        local: for local layers.
    """

    whole: varlen.Layout
    local: varlen.Layout


# `seqused_k` came with the two corrections named above
_FORWARD = (
    "_cudnn_attention_forward",
    *("query", "key", "value", "attn_bias", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "compute_log_sumexp"),
    *("dropout_p", "is_causal", "return_debug_mask", "seqused_k"),
)
_BACKWARD = (
    "_cudnn_attention_backward",
    *("grad_out", "query", "key", "value", "out", "logsumexp", "philox_seed", "philox_offset", "attn_bias"),
    *("cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"),
)


def support(device: torch.device, dtype: torch.dtype, order: Order = "all", bias: Bias | None = None) -> str | None:
    """See `Kernel.support`."""
    if (reason := varlen.support(device, dtype, order, bias)) is not None:
        return reason
    if torch.version.hip is not None:
        return "it needs an NVIDIA GPU"
    if (reason := varlen.missing_in_torch(_FORWARD, _BACKWARD, oldest="2.14")) is not None:
        return reason
    if torch.cuda.get_device_capability(device)[0] not in (9, 10):
        return f"it needs compute capability 9 or 10, and {torch.cuda.get_device_name(device)} has another"
    if (version := torch.backends.cudnn.version() or 0) < MIN_CUDNN:
        return (
            f"it needs cuDNN {_release(MIN_CUDNN)}, and torch {torch.__version__} runs with {_release(version)}: "
            "install torch 2.15, or a newer nvidia-cudnn"
        )
    if torch.are_deterministic_algorithms_enabled():
        return "its backward pass sums in no fixed order, and compute.deterministic requires one"
    return None


def _release(version: int) -> str:
    return f"{version // 10_000}.{version // 100 % 100}.{version % 100}" if version else "none"


def prepare(packed: Packed, visible: Visible) -> Layout:
    """See `Kernel.prepare`; without a host sync."""
    step = max(_SHORTEST, -(-packed.max_seqlen // _LENGTHS))
    longest = packed.max_seqlen if packed.longest is None else packed.longest
    rounded = replace(packed, longest=-(-longest // step) * step)
    return Layout(varlen.prepare(rounded, visible), varlen.prepare(packed, visible))


def attend(
    q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, layout: Layout, window: bool, bias: ScoreBias | None = None
) -> Tensor:
    """See `Kernel.attend`."""
    visible = layout.whole.visible
    if window and visible.window is not None:
        return varlen.attend(q_TNH, k_TNH, v_TNH, layout.local, window, bias)
    assert bias is None, "support() refuses a bias"
    assert q_TNH.shape[-1] in CUDNN_HEADS, "the check of the configuration refuses these heads"
    whole_layout = layout.whole
    out_TNH, _ = _attention(
        q_TNH, k_TNH, v_TNH, whole_layout.cu_seqlens_S, whole_layout.longest, *visible.sides(window)
    )
    return out_TNH


def _forward(
    q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, cu_seqlens_S: Tensor, longest: int, before: int, after: int
) -> tuple[Tensor, Tensor]:
    # cuDNN's offsets have 32 bits, and torch checks them only from 2.15 on
    assert len(q_TNH) * max(x.stride(0) for x in (q_TNH, k_TNH, v_TNH)) < 1 << 31, "too many tokens for cuDNN at once"
    out_TNH, lse_NT, *_ = torch.ops.aten._cudnn_attention_forward(
        query=q_TNH,
        key=k_TNH,
        value=v_TNH,
        attn_bias=None,
        cum_seq_q=cu_seqlens_S,
        cum_seq_k=cu_seqlens_S,
        max_q=longest,
        max_k=longest,
        compute_log_sumexp=True,
        dropout_p=0.0,
        is_causal=varlen.is_causal(before, after),
        return_debug_mask=False,
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
    unused = torch.empty((), dtype=torch.int64, device=q_TNH.device)  # random state, only read with dropout
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._cudnn_attention_backward(
        grad_out=grad_TNH,  # contiguous: another layout faults before torch 2.15 (pull request 194818)
        query=q_TNH,
        key=k_TNH,
        value=v_TNH,
        out=out_TNH,
        logsumexp=lse_NT,
        philox_seed=unused,
        philox_offset=unused,
        attn_bias=None,
        cum_seq_q=cu_seqlens_S,
        cum_seq_k=cu_seqlens_S,
        max_q=longest,
        max_k=longest,
        dropout_p=0.0,
        is_causal=varlen.is_causal(before, after),
    )
    return grads


_attention, _gradients = operator("cudnn_attention", _forward, _backward)


def backend(device: torch.device, dtype: torch.dtype) -> str:
    """Return the release of cuDNN that torch runs with."""
    return f"cuDNN {_release(torch.backends.cudnn.version() or 0)}"
