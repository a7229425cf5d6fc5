"""FlexAttention: a Triton kernel that torch compiles from the mask, for CUDA in fp32 too and for masks nobody else has.

The packed buffer is one row; a BlockMask says which blocks of 128 x 128 tokens hold visible pairs, and only those are
computed. It is built from the boundaries of the sequences, block by block: no T x T mask exists, nothing waits for the
device, and shapes depend on T alone, so that the kernel is compiled once for each kind of layer. Without the compiler
FlexAttention writes out all T x T scores, and on a CPU it has no backward pass; both are refused.

Shape legend: T packed tokens, S sequences (padded), N heads, H head width, B blocks of the buffer.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from modernbert_train.batch import Batch
from modernbert_train.models.attention.varlen import gpu_support

name = "flex"
traits = "window; backward, deterministic; compiled by Triton"

BLOCK = 128


@dataclass(frozen=True)
class Layout:
    """Visible blocks, and within them tokens, of global and of local layers."""

    whole: BlockMask
    local: BlockMask


def support(device: torch.device, dtype: torch.dtype) -> str | None:
    """See `Kernel.support`."""
    if device.type == "cpu":
        return "FlexAttention has no backward pass on CPUs"
    if importlib.util.find_spec("triton") is None:
        return "Triton, which compiles it, is not installed"
    return gpu_support(device, dtype, (torch.bfloat16, torch.float16, torch.float32))


def prepare(batch: Batch, half_window: int) -> Layout:
    """See `Kernel.prepare`; nothing is read back from the device."""
    num_tokens = len(batch.input_ids_T)
    position_T = torch.arange(num_tokens, device=batch.cu_seqlens_S.device)
    sequence_T = torch.searchsorted(batch.cu_seqlens_S[1:].contiguous(), position_T, right=True)

    def whole(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return sequence_T[q] == sequence_T[k]

    def local(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (sequence_T[q] == sequence_T[k]) & ((q - k).abs() <= half_window)

    # Sequence numbers ascend along the buffer, so two blocks share one exactly if their ranges overlap. What the last
    # block lacks gets a number of its own, so that the block is never taken for one that is visible throughout.
    missing, beyond = -num_tokens % BLOCK, len(batch.cu_seqlens_S)
    sequence_BQ = F.pad(sequence_T, (0, missing), value=beyond).unflatten(0, (-1, BLOCK))
    first_B, last_B = sequence_BQ[:, 0], sequence_BQ[:, -1]
    some_BB = (first_B[:, None] <= last_B) & (first_B <= last_B[:, None])
    every_BB = (first_B[:, None] == last_B) & (first_B == last_B[:, None])

    block_B = torch.arange(len(first_B), device=first_B.device)
    apart_BB = (block_B[:, None] - block_B).abs()
    near_BB = (apart_BB - 1) * BLOCK + 1 <= half_window  # the closest pair of tokens
    inside_BB = (apart_BB + 1) * BLOCK - 1 <= half_window  # the farthest
    return Layout(
        _block_mask(some_BB, every_BB, whole, num_tokens),
        _block_mask(some_BB & near_BB, every_BB & inside_BB, local, num_tokens),
    )


def attend(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, layout: Layout, window: bool) -> Tensor:
    """See `Kernel.attend`."""
    q, k, v = (x_TNH.transpose(0, 1).unsqueeze(0) for x_TNH in (q_TNH, k_TNH, v_TNH))
    mask = layout.local if window else layout.whole
    out: Tensor = _compiled()(q, k, v, block_mask=mask)
    return out.squeeze(0).transpose(0, 1)


def _block_mask(some_BB: Tensor, every_BB: Tensor, visible: Callable[..., Tensor], num_tokens: int) -> BlockMask:
    """A BlockMask from the blocks with some visible pair and those with every pair visible, which need no mask."""
    partial, full = (_ordered(blocks_BB) for blocks_BB in (some_BB & ~every_BB, every_BB))
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK, visible, (num_tokens, num_tokens))


def _ordered(blocks_BB: Tensor) -> tuple[Tensor, Tensor]:
    """How many key blocks each query block sees, and their numbers, those that it sees first."""
    blocks_11BB = blocks_BB[None, None].to(torch.int32)
    order = blocks_11BB.argsort(dim=-1, descending=True, stable=True)
    return blocks_11BB.sum(-1, dtype=torch.int32), order.to(torch.int32)


@functools.cache
def _compiled() -> Callable[..., Any]:
    """FlexAttention's fused kernel; `fullgraph` makes a failure to compile an error, not T x T scores."""
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)
