"""FlexAttention: a Triton kernel that torch compiles from the mask, for CUDA in fp32 too and for masks nobody else has.

The packed buffer is one row; a BlockMask says which blocks of 128 x 128 tokens hold visible pairs, and only those are
computed. It is built from the boundaries of the sequences, block by block: no T x T mask exists, nothing waits for the
device, and shapes depend on T alone, so that the kernel is compiled once for each kind of layer. Without the compiler
FlexAttention writes out all T x T scores, and on a CPU it has no backward pass; both are refused.

What a model adds to the scores is looked up pair by pair within the kernel, in tables of N T P numbers, where `sdpa`
has N n^2 for each sequence of n tokens. Its backward pass adds to the tables' gradients, in fp32 and in any order.

Shape legend: T packed tokens, S sequences (padded), N heads, H head width, B blocks of the buffer, P rows of a table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from modernbert_train.batch import QUERY_RANK, Order, Packed
from modernbert_train.config.model import Bias
from modernbert_train.config.packages import missing_on_gpu
from modernbert_train.models.attention.varlen import gpu_support
from modernbert_train.models.attention.visible import PairBias, ScoreBias, Visible
from modernbert_train.models.compiler import set_up_compiler

name = "flex"
traits = "window; any order; bias of pairs; backward, deterministic without a bias; compiled by Triton"

BLOCK = 128


@dataclass(frozen=True)
class Layout:
    """Visible blocks, and within them tokens, of global and of local layers, if there are any."""

    everywhere: BlockMask
    local: BlockMask | None


def support(device: torch.device, dtype: torch.dtype, order: Order = "all", bias: Bias | None = None) -> str | None:
    """See `Kernel.support`. A bias is looked up in tables, whose gradients are summed in no fixed order."""
    if bias == "sequences":
        return "it adds nothing to the scores that is made of whole sequences, as the model needs"
    if bias and torch.are_deterministic_algorithms_enabled():
        return (
            "it sums gradients of what is added to the scores in no fixed order, and compute.deterministic asks for one"
        )
    if device.type == "cpu":
        return "FlexAttention has no backward pass on CPUs"
    if lacks := missing_on_gpu():
        return lacks[0]
    return gpu_support(device, dtype, (torch.bfloat16, torch.float16, torch.float32))


def prepare(packed: Packed, visible: Visible) -> Layout:
    """See `Kernel.prepare`; nothing is read back from the device."""
    num_tokens = len(packed.input_ids_T)
    position_T = torch.arange(num_tokens, device=packed.cu_seqlens_S.device)
    sequence_T = torch.searchsorted(packed.cu_seqlens_S[1:].contiguous(), position_T, right=True)

    # Sequence numbers ascend along the buffer, so two blocks share one exactly if their ranges overlap. What the last
    # block lacks gets a number of its own, so that the block is never taken for one that is visible throughout.
    missing, beyond = -num_tokens % BLOCK, len(packed.cu_seqlens_S)
    sequence_BQ = F.pad(sequence_T, (0, missing), value=beyond).unflatten(0, (-1, BLOCK))
    first_B, last_B = sequence_BQ[:, 0], sequence_BQ[:, -1]
    some_BB = (first_B[:, None] <= last_B) & (first_B <= last_B[:, None])
    every_BB = (first_B[:, None] == last_B) & (first_B == last_B[:, None])

    if visible.order == "given":
        return _given(packed, visible, sequence_T, some_BB)

    block_B = torch.arange(len(first_B), device=first_B.device)
    back_BB = (block_B[:, None] - block_B) * BLOCK  # tokens that a key block stands before its query block

    def mask(window: bool) -> BlockMask:
        """Of the layers of one kind."""
        sides = [num_tokens if side < 0 else side for side in visible.sides(window)]
        before, after = sides

        def seen(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            same = sequence_T[q] == sequence_T[k]
            return same if min(sides) >= num_tokens else same & (q - k <= before) & (k - q <= after)

        nearest, farthest = BLOCK - 1, -(BLOCK - 1)  # of the pairs of two blocks, the keys being one way or the other
        some = some_BB & (back_BB - nearest <= before) & (-back_BB - nearest <= after)
        every = every_BB & (back_BB - farthest <= before) & (-back_BB - farthest <= after)
        return _block_mask(some, every, seen, num_tokens)

    return Layout(mask(False), None if visible.window is None else mask(True))


def _given(packed: Packed, visible: Visible, sequence_T: Tensor, some_BB: Tensor) -> Layout:
    """Ranks below limits, in local layers of near positions; no block is seen throughout, since targets lie anywhere.

    Args:
        packed, visible: see `Kernel.prepare`.
        sequence_T: number of each token's sequence.
        some_BB: blocks that share a sequence.
    """
    assert packed.ranks_T is not None and packed.limits_T is not None, "an order that nobody gave"
    ranks_T, limits_T, position_T = packed.ranks_T, packed.limits_T, packed.position_ids_T
    num_tokens, missing = len(ranks_T), -len(ranks_T) % BLOCK
    lowest_B = F.pad(ranks_T, (0, missing), value=QUERY_RANK).unflatten(0, (-1, BLOCK)).amin(1)
    highest_B = F.pad(limits_T, (0, missing), value=-1).unflatten(0, (-1, BLOCK)).amax(1)
    some_BB = some_BB & (lowest_B < highest_B[:, None])
    # the last position again for what the last block lacks: it is neither the nearest nor the farthest
    position_BQ = torch.cat([position_T, position_T[-1:].expand(missing)]).unflatten(0, (-1, BLOCK))
    near_B, far_B = position_BQ.amin(1), position_BQ.amax(1)

    def mask(window: tuple[int, int] | None) -> BlockMask:
        def seen(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            known = (sequence_T[q] == sequence_T[k]) & (ranks_T[k] < limits_T[q])
            if window is None:
                return known
            back = position_T[q] - position_T[k]
            return known & (back <= window[0]) & (back >= -window[1])

        some = some_BB
        if window is not None:
            some = some & (near_B[:, None] - far_B <= window[0]) & (near_B - far_B[:, None] <= window[1])
        return _block_mask(some, torch.zeros_like(some), seen, num_tokens)

    return Layout(mask(None), None if visible.window is None else mask(visible.window))


def attend(
    q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, layout: Layout, window: bool, bias: ScoreBias | None = None
) -> Tensor:
    """See `Kernel.attend`; a token that sees nothing gets zeros from FlexAttention itself."""
    q, k, v = (x_TNH.transpose(0, 1).unsqueeze(0) for x_TNH in (q_TNH, k_TNH, v_TNH))
    mask = layout.local if window else layout.everywhere
    out: Tensor = _compiled()(q, k, v, score_mod=None if bias is None else _sum(bias), block_mask=mask)
    return out.squeeze(0).transpose(0, 1)


def _sum(bias: ScoreBias) -> Callable[..., Tensor]:
    """A score with what is added to it."""
    added = cast(PairBias, bias).of_pairs()

    def score(scaled: Tensor, _b: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return scaled + added(head, q, k)

    return score


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
    set_up_compiler()
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)
