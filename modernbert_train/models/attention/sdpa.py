"""Attention with torch's scaled_dot_product_attention alone: any device, any dtype, and the meaning of the others.

Neither form ever builds a T x T mask. Local layers cut the buffer into blocks of queries, each with the keys of its own
block and half a window on either side, in one batched call: time and memory grow linearly with T. Global layers take
one call for each sequence. Measured on one core (16,384 tokens, 12 heads of 64, forward and backward): local layers
0.91 s with blocks of 64, 1.10 s with 128, 1.29 s with 256; global layers, documents of median 300 tokens, 1.13 s by
sequence against 1.95 s in padded buckets of equal length (2.0 s against 2.3 s with full rows of 1,024).

Shape legend: T packed tokens, S sequences (padded), N heads, H head width, B blocks, Q queries in a block,
K keys that a block sees.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from modernbert_train.batch import Batch

name = "sdpa"
traits = "any device and precision; window; backward, deterministic on CPUs"

BLOCK_QUERIES = 64


@dataclass(frozen=True)
class Layout:
    """The lengths of the sequences on the host, and which keys each query of a local layer sees."""

    lengths: list[int]
    visible_B1QK: Tensor
    half_window: int


def support(device: torch.device, dtype: torch.dtype) -> str | None:
    """See `Kernel.support`: it serves everywhere."""
    return None


def prepare(batch: Batch, half_window: int) -> Layout:
    """See `Kernel.prepare`. On a GPU this waits for the device once, to read the boundaries."""
    num_tokens = len(batch.input_ids_T)
    device = batch.cu_seqlens_S.device
    lengths = [n for n in batch.cu_seqlens_S.diff().tolist() if n > 0]
    assert sum(lengths) == num_tokens, "cu_seqlens must run from 0 to T"

    num_blocks = -(-num_tokens // BLOCK_QUERIES)
    line_end = num_blocks * BLOCK_QUERIES
    sequence_T = torch.arange(len(lengths), device=device).repeat_interleave(
        torch.tensor(lengths, device=device), output_size=num_tokens
    )
    # What lies beyond the buffer is a sequence of its own (-1), so that no query is left without a key: that gives NaN.
    sequence = F.pad(sequence_T, (half_window, half_window + line_end - num_tokens), value=-1)
    position = torch.arange(-half_window, line_end + half_window, device=device)
    sequence_BK, position_BK = _windows(sequence, half_window), _windows(position, half_window)
    own = slice(half_window, half_window + BLOCK_QUERIES)
    same_BQK = sequence_BK[:, own, None] == sequence_BK[:, None, :]
    near_BQK = (position_BK[:, own, None] - position_BK[:, None, :]).abs() <= half_window
    return Layout(lengths, (same_BQK & near_BQK).unsqueeze(1), half_window)


@torch.compiler.disable  # the lengths differ in every microbatch: a graph would be compiled for each
def attend(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, layout: Layout, window: bool) -> Tensor:
    """See `Kernel.attend`."""
    if window:
        return _attend_local(q_TNH, k_TNH, v_TNH, layout)
    # split, not slices: its backward joins the gradients once, where each slice would fill a whole line with zeros
    parts = zip(*(x_TNH.unsqueeze(0).split(layout.lengths, dim=1) for x_TNH in (q_TNH, k_TNH, v_TNH)), strict=True)
    return torch.cat([_sdpa(q, k, v, None) for q, k, v in parts], dim=1).squeeze(0)


def _attend_local(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, layout: Layout) -> Tensor:
    num_tokens, side = len(q_TNH), layout.half_window
    missing = -num_tokens % BLOCK_QUERIES
    q_BQNH = F.pad(q_TNH, (0, 0, 0, 0, 0, missing)).unflatten(0, (-1, BLOCK_QUERIES))
    k_BKNH, v_BKNH = (_windows(F.pad(x, (0, 0, 0, 0, side, side + missing)), side) for x in (k_TNH, v_TNH))
    return _sdpa(q_BQNH, k_BKNH, v_BKNH, layout.visible_B1QK).flatten(0, 1)[:num_tokens]


def _windows(line: Tensor, half_window: int) -> Tensor:
    """Overlapping views of a padded line: [2 * half_window + T', ...] -> [B, K, ...], without a copy."""
    return line.unfold(0, BLOCK_QUERIES + 2 * half_window, BLOCK_QUERIES).movedim(-1, 1)


def _sdpa(q_BQNH: Tensor, k_BKNH: Tensor, v_BKNH: Tensor, visible_B1QK: Tensor | None) -> Tensor:
    q_BNQH, k_BNKH, v_BNKH = (x.transpose(1, 2) for x in (q_BQNH, k_BKNH, v_BKNH))
    return F.scaled_dot_product_attention(q_BNQH, k_BNKH, v_BNKH, attn_mask=visible_B1QK).transpose(1, 2)
