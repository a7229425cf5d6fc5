"""Attention by torch's scaled_dot_product_attention: any device, any dtype, and the reference for other kernels.

Neither form ever builds a T x T mask. Local layers cut the buffer into blocks of queries, each with the keys of its own
block and half a window on either side, in one batched call: time and memory grow linearly with T. Global layers make
one call for each sequence; so do local layers where sequences are so short that this computes fewer pairs. Measured
on one core (16,384 tokens, 12 heads of 64, forward and backward): local layers 0.91 s with blocks of 64, 1.10 s with
128, 1.29 s with 256; global layers, documents of median 300 tokens, 1.13 s by sequence against 1.95 s in padded buckets
of equal length (2.0 s against 2.3 s with full rows of 1,024).

On a CPU with bf16 instructions, attention uses them only for long sequences without a mask: at 1,024 tokens the
backward pass takes 26 ms, in fp32 42 ms, and at 512 both take the same. With a mask bf16 takes 21 ms, and fp32 with its
casts 13 ms; in sequences of 60 tokens 6.5 and 2.3 ms (one core with AVX512-BF16, 3 heads of 64). So these run in fp32.

The order "given", and a bias, use one call for each sequence in local layers too, each with its own mask: memory grows
with the squares of the lengths.

Shape legend: T packed tokens, S sequences (padded), N heads, H head width, B blocks, Q queries in a block,
K keys that a block sees.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from modernbert_train.batch import Order, Packed
from modernbert_train.config.model import Bias
from modernbert_train.models.attention.visible import ScoreBias, Visible

_LONG = 768  # minimum length, in tokens, of sequences that a CPU computes in bf16

name = "sdpa"
traits = "any device and precision; window; any order; bias; backward, deterministic, GPU: with compute.deterministic"


@dataclass(frozen=True)
class Masked:
    """Visible keys of each query; a blind query, which sees none, is computed over all keys and zeroed afterwards."""

    visible_QK: Tensor
    blind_Q1: Tensor


@dataclass  # not frozen: torch 2.11 guards every list of a frozen one, and recompiles layers for other documents
class Layout:
    """The lengths of the sequences on the host, and the masks of local layers or of the order "given".

    Attributes:
        lengths: of the sequences.
        visible: as passed to `prepare`.
        visible_B1QK: mask of each block of queries in local layers; None without them.
        bands: mask of each sequence in local layers, or None if a query sees all of it; used instead of `visible_B1QK`
            where that computes fewer pairs.
        masks: for the order "given", used instead of both: by sequence, in global layers (False) and local ones (True).
    """

    lengths: list[int]
    visible: Visible
    visible_B1QK: Tensor | None = None
    bands: list[Tensor | None] | None = None
    masks: dict[bool, list[Masked]] | None = None


def support(device: torch.device, dtype: torch.dtype, order: Order = "all", bias: Bias | None = None) -> str | None:
    """See `Kernel.support`: everything is supported."""
    return None


def prepare(packed: Packed, visible: Visible) -> Layout:
    """See `Kernel.prepare`. On a GPU this syncs with the device once, to read the boundaries."""
    num_tokens = len(packed.input_ids_T)
    device = packed.cu_seqlens_S.device
    lengths = [n for n in packed.cu_seqlens_S.diff().tolist() if n > 0]
    assert sum(lengths) == num_tokens, "cu_seqlens must run from 0 to T"
    if visible.order == "given":
        return Layout(lengths, visible, masks=_masks(packed, visible, lengths))
    if visible.window is None:
        return Layout(lengths, visible)

    (before, after), block = visible.sides(True), visible.block
    # compare the pairs computed by sequence with the pairs computed by blocks, which see themselves and both sides
    if sum(n * n for n in lengths) < num_tokens * (before + block + after):
        return Layout(lengths, visible, bands=[_band(n, before, after, device) for n in lengths])
    num_blocks = -(-num_tokens // block)
    line_end = num_blocks * block
    sequence_T = torch.arange(len(lengths), device=device).repeat_interleave(
        torch.tensor(lengths, device=device), output_size=num_tokens
    )
    # Tokens beyond the buffer are an extra sequence (-1), so that every query has a key: without one it becomes NaN.
    sequence = F.pad(sequence_T, (before, after + line_end - num_tokens), value=-1)
    position = torch.arange(-before, line_end + after, device=device)
    sequence_BK, position_BK = (_windows(x, before + after, block) for x in (sequence, position))
    own = slice(before, before + block)
    same_BQK = sequence_BK[:, own, None] == sequence_BK[:, None, :]
    back_BQK = position_BK[:, own, None] - position_BK[:, None, :]  # distance from a key forward to its query
    return Layout(lengths, visible, (same_BQK & (back_BQK <= before) & (back_BQK >= -after)).unsqueeze(1))


def _band(length: int, before: int, after: int, device: torch.device) -> Tensor | None:
    if length <= 1 + min(before, after):
        return None
    position = torch.arange(length, device=device)
    back_QK = position[:, None] - position
    return (back_QK <= before) & (back_QK >= -after)


def _masks(packed: Packed, visible: Visible, lengths: list[int]) -> dict[bool, list[Masked]]:
    """Build the masks of the order "given" from ranks and limits; in local layers, from positions too."""
    assert packed.ranks_T is not None and packed.limits_T is not None, 'the order "given" without ranks and limits'
    masks: dict[bool, list[Masked]] = {False: [], True: []}
    each = (x_T.split(lengths) for x_T in (packed.ranks_T, packed.limits_T, packed.position_ids_T))
    for ranks, limits, positions in zip(*each, strict=True):
        seen_QK = ranks < limits[:, None]
        masks[False].append(_masked(seen_QK))
        if visible.window is not None:
            before, after = visible.window
            back_QK = positions[:, None] - positions
            masks[True].append(_masked(seen_QK & (back_QK <= before) & (back_QK >= -after)))
    return masks


def _masked(seen_QK: Tensor) -> Masked:
    blind_Q1 = ~seen_QK.any(dim=1, keepdim=True)
    # softmax over no key is NaN, and so is its gradient, even if the output is overwritten
    return Masked(seen_QK | blind_Q1, blind_Q1)


@torch.compiler.disable  # the lengths differ in every microbatch: each would compile a graph
def attend(
    q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, layout: Layout, window: bool, bias: ScoreBias | None = None
) -> Tensor:
    """See `Kernel.attend`."""
    if layout.masks is not None or bias is not None:
        return _attend_each(q_TNH, k_TNH, v_TNH, layout, window, bias)
    if window and layout.bands is None:
        return _attend_local(q_TNH, k_TNH, v_TNH, layout)
    bands = layout.bands if window and layout.bands is not None else [None] * len(layout.lengths)
    # split, not slices: its backward concatenates the gradients once, where each slice would zero-fill a whole buffer
    sequences = zip(*(x_TNH.unsqueeze(0).split(layout.lengths, dim=1) for x_TNH in (q_TNH, k_TNH, v_TNH)), strict=True)
    causal = layout.visible.order == "causal"
    out = [_sdpa(q, k, v, band, causal and band is None) for (q, k, v), band in zip(sequences, bands, strict=True)]
    return torch.cat(out, dim=1).squeeze(0)


def _attend_each(
    q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, layout: Layout, window: bool, bias: ScoreBias | None
) -> Tensor:
    """Call SDPA for each sequence with its own mask and bias."""
    assert layout.masks is not None or not window, "a bias in local layers"
    causal, start, out = layout.visible.order == "causal", 0, []
    sequences = zip(*(x_TNH.split(layout.lengths) for x_TNH in (q_TNH, k_TNH, v_TNH)), strict=True)
    for number, (q, k, v) in enumerate(sequences):
        masked = None if layout.masks is None else layout.masks[window][number]
        mask_QK = None if masked is None else masked.visible_QK
        if bias is not None:
            hidden_QK = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1) if causal else None
            hidden_QK = hidden_QK if mask_QK is None else ~mask_QK
            mask_QK = bias(start, start + len(q)).to(q.dtype)
            mask_QK = mask_QK if hidden_QK is None else mask_QK.masked_fill(hidden_QK, -torch.inf)
        is_causal = causal and bias is None
        out_QNH = _sdpa(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), mask_QK, is_causal).squeeze(0)
        out.append(out_QNH if masked is None else out_QNH.masked_fill(masked.blind_Q1.unsqueeze(1), 0.0))
        start += len(q)
    return torch.cat(out)


def _attend_local(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, layout: Layout) -> Tensor:
    num_tokens, (before, after), block = len(q_TNH), layout.visible.sides(True), layout.visible.block
    missing, dtype = -num_tokens % block, q_TNH.dtype
    if _is_bf16_on_cpu(q_TNH):  # cast now: the windows below hold each key three times
        q_TNH, k_TNH, v_TNH = q_TNH.float(), k_TNH.float(), v_TNH.float()
    # keys are padded before the first token and after the last, so that every block has equally many
    q_BQNH = F.pad(q_TNH, (0, 0, 0, 0, 0, missing)).unflatten(0, (-1, block))
    padded = (F.pad(x, (0, 0, 0, 0, before, after + missing)) for x in (k_TNH, v_TNH))
    k_BKNH, v_BKNH = (_windows(x, before + after, block) for x in padded)
    return _sdpa(q_BQNH, k_BKNH, v_BKNH, layout.visible_B1QK).flatten(0, 1)[:num_tokens].to(dtype)


def _windows(padded: Tensor, sides: int, block: int) -> Tensor:
    """Return overlapping views of a padded buffer: [sides + T', ...] -> [B, K, ...], without a copy."""
    return padded.unfold(0, block + sides, block).movedim(-1, 1)


def _sdpa(
    q_BQNH: Tensor, k_BKNH: Tensor, v_BKNH: Tensor, visible_B1QK: Tensor | None = None, causal: bool = False
) -> Tensor:
    if _is_bf16_on_cpu(q_BQNH) and (visible_B1QK is not None or q_BQNH.shape[1] < _LONG):
        if visible_B1QK is not None and visible_B1QK.is_floating_point():
            visible_B1QK = visible_B1QK.float()
        return _sdpa(q_BQNH.float(), k_BKNH.float(), v_BKNH.float(), visible_B1QK, causal).to(q_BQNH.dtype)
    q_BNQH, k_BNKH, v_BNKH = (x.transpose(1, 2) for x in (q_BQNH, k_BKNH, v_BKNH))
    # q, k and v already have the intended precision: autocast would cast them back to bf16
    with torch.autocast("cpu", enabled=False) if q_BQNH.device.type == "cpu" else nullcontext():
        out_BNQH = F.scaled_dot_product_attention(q_BNQH, k_BNKH, v_BNKH, attn_mask=visible_B1QK, is_causal=causal)
    return out_BNQH.transpose(1, 2)


def _is_bf16_on_cpu(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.device.type == "cpu"
