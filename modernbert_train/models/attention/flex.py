"""FlexAttention: a Triton kernel that torch compiles from the mask. CUDA, fp32 too; the only GPU kernel for any order.

The packed buffer is one row; a BlockMask marks the blocks of 128 x 128 tokens with visible pairs, and only those are
computed. It is built from the boundaries of the sequences, block by block: no T x T mask, no wait for the device, and
shapes depend on T only, so the kernel is compiled once for each kind of layer. Without the compiler FlexAttention
materialises all T x T scores, and on a CPU it lacks a backward pass; both are refused.

A bias on the scores is looked up pair by pair within the kernel, in tables of N T P numbers, where `sdpa` builds N n^2
for each sequence of n tokens. The backward pass accumulates the tables' gradients in fp32, in any order.

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
    """Visible blocks, and the visible tokens within them, of global layers and of local ones (None: all are global)."""

    everywhere: BlockMask
    local: BlockMask | None


def support(device: torch.device, dtype: torch.dtype, order: Order = "all", bias: Bias | None = None) -> str | None:
    """See `Kernel.support`. A bias is looked up in tables, whose gradients are summed in no fixed order."""
    if bias == "sequences":
        return "it cannot add a bias computed from whole sequences, which the model needs"
    if bias and torch.are_deterministic_algorithms_enabled():
        return "it sums the gradients of a bias in no fixed order, and compute.deterministic requires one"
    if device.type == "cpu":
        return "FlexAttention lacks a backward pass on CPUs"
    if lacks := missing_on_gpu():
        return lacks[0]
    return gpu_support(device, dtype, (torch.bfloat16, torch.float16, torch.float32))


def prepare(packed: Packed, visible: Visible) -> Layout:
    """See `Kernel.prepare`; without a host sync."""
    num_tokens = len(packed.input_ids_T)
    position_T = torch.arange(num_tokens, device=packed.cu_seqlens_S.device)
    sequence_T = torch.searchsorted(packed.cu_seqlens_S[1:].contiguous(), position_T, right=True)

    # Sequence numbers ascend along the buffer, so two blocks share a sequence exactly if their ranges overlap. The last
    # block is filled with an extra number, so that it never counts as fully visible.
    missing, beyond = -num_tokens % BLOCK, len(packed.cu_seqlens_S)
    sequence_BQ = F.pad(sequence_T, (0, missing), value=beyond).unflatten(0, (-1, BLOCK))
    first_B, last_B = sequence_BQ[:, 0], sequence_BQ[:, -1]
    some_BB = (first_B[:, None] <= last_B) & (first_B <= last_B[:, None])
    every_BB = (first_B[:, None] == last_B) & (first_B == last_B[:, None])

    if visible.order == "given":
        return _given(packed, visible, sequence_T, some_BB)

    block_B = torch.arange(len(first_B), device=first_B.device)
    back_BB = (
        block_B[:, None] - block_B
    ) * BLOCK  # tokens from the start of a key block to the start of its query block

    def mask(window: bool) -> BlockMask:
        """Return the mask of global or local layers."""
        sides = [num_tokens if side < 0 else side for side in visible.sides(window)]
        before, after = sides

        def seen(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            same = sequence_T[q] == sequence_T[k]
            return same if min(sides) >= num_tokens else same & (q - k <= before) & (k - q <= after)

        nearest, farthest = BLOCK - 1, -(BLOCK - 1)  # offsets, within two blocks, of their nearest and farthest pair
        some = some_BB & (back_BB - nearest <= before) & (-back_BB - nearest <= after)
        every = every_BB & (back_BB - farthest <= before) & (-back_BB - farthest <= after)
        return _block_mask(some, every, seen, num_tokens)

    return Layout(mask(False), None if visible.window is None else mask(True))


def _given(packed: Packed, visible: Visible, sequence_T: Tensor, some_BB: Tensor) -> Layout:
    """Build the masks of the order "given": a key's rank is below the query's limit; in local layers also near.

    No block counts as fully visible, since targets lie anywhere.

    Args:
        packed, visible: see `Kernel.prepare`.
        sequence_T: number of each token's sequence.
        some_BB: blocks that share a sequence.
    """
    assert packed.ranks_T is not None and packed.limits_T is not None, 'the order "given" without ranks and limits'
    ranks_T, limits_T, position_T = packed.ranks_T, packed.limits_T, packed.position_ids_T
    num_tokens, missing = len(ranks_T), -len(ranks_T) % BLOCK
    lowest_B = F.pad(ranks_T, (0, missing), value=QUERY_RANK).unflatten(0, (-1, BLOCK)).amin(1)
    highest_B = F.pad(limits_T, (0, missing), value=-1).unflatten(0, (-1, BLOCK)).amax(1)
    some_BB = some_BB & (lowest_B < highest_B[:, None])
    # FlexAttention skips a block whole, so bounds of a block may be too wide and never too narrow.
    # Fill the last block with the last position, which changes neither its minimum nor its maximum
    position_BQ = torch.cat([position_T, position_T[-1:].expand(missing)]).unflatten(0, (-1, BLOCK))
    near_B, far_B = position_BQ.amin(1), position_BQ.amax(1)

    def mask(window: tuple[int, int] | None) -> BlockMask:
        def seen(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            permitted = (sequence_T[q] == sequence_T[k]) & (ranks_T[k] < limits_T[q])
            if window is None:
                return permitted
            back = position_T[q] - position_T[k]
            return permitted & (back <= window[0]) & (back >= -window[1])

        some = some_BB
        if window is not None:
            some = some & (near_B[:, None] - far_B <= window[0]) & (near_B - far_B[:, None] <= window[1])
        return _block_mask(some, torch.zeros_like(some), seen, num_tokens)

    return Layout(mask(None), None if visible.window is None else mask(visible.window))


def attend(
    q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, layout: Layout, window: bool, bias: ScoreBias | None = None
) -> Tensor:
    """See `Kernel.attend`; FlexAttention itself returns zeros for a token that sees no key."""
    q, k, v = (x_TNH.transpose(0, 1).unsqueeze(0) for x_TNH in (q_TNH, k_TNH, v_TNH))
    mask = layout.local if window else layout.everywhere
    # a compiled function within a compiled layer is one graph with it, but to torch 2.15, which breaks the graph there
    kernel = flex_attention if torch.compiler.is_compiling() else _compiled()
    out: Tensor = kernel(q, k, v, score_mod=None if bias is None else _sum(bias), block_mask=mask)
    return out.squeeze(0).transpose(0, 1)


def _sum(bias: ScoreBias) -> Callable[..., Tensor]:
    """Return a score_mod that adds the bias to a score."""
    added = cast(PairBias, bias).of_pairs()

    def score(scaled: Tensor, _b: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return scaled + added(head, q, k)

    return score


def _block_mask(some_BB: Tensor, every_BB: Tensor, visible: Callable[..., Tensor], num_tokens: int) -> BlockMask:
    """Return a BlockMask; `some_BB` have a visible pair, and in `every_BB` all pairs are visible, without a mask."""
    partial, full = (_ordered(blocks_BB) for blocks_BB in (some_BB & ~every_BB, every_BB))
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK, visible, (num_tokens, num_tokens))


def _ordered(blocks_BB: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of key blocks that each query block sees, and all key blocks with the visible ones first."""
    blocks_11BB = blocks_BB[None, None].to(torch.int32)
    order = blocks_11BB.argsort(dim=-1, descending=True, stable=True)  # stable: keys in order, so sums repeat
    return blocks_11BB.sum(-1, dtype=torch.int32), order.to(torch.int32)


@functools.cache
def _compiled() -> Callable[..., Any]:
    """Return FlexAttention's fused kernel; `fullgraph` turns a failure to compile into an error, not T x T scores."""
    set_up_compiler()
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)
