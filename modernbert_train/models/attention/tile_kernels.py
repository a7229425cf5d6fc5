"""Windowed attention in Triton, in tiles of 64 tokens of the packed buffer; one backward pass, without atomics.

With a window of 64 tokens on each side, any query of a tile sees at most three tiles of keys, 192 tokens; with tiles of
128, as in FlashAttention, it would be 352 to 384. Tiles are cut from the buffer and not from each sequence, so that no
block of the grid is empty. The keys of a query are an interval of the buffer: its sequence, clipped to the window.

The forward kernel rotates q and k as it loads them and keeps the rotated ones for the backward kernel, which rotates
gradients back as it stores them. Rotating in the backward kernel too would save that write (4 H bytes for a token and
head), but its inner loop would need half as many instructions again (3,700 instead of 2,400 on sm_90) and spill.

In the backward pass, a program walks over a run of neighbouring tiles of keys and holds the gradients of the queries
around the current one. Scores of each pair of tiles are then computed once: for a run of R tiles 15 R + 6 products, and
not the 21 R of one pass for queries and one for keys. Queries in tiles next to a run belong to other programs, so their
gradients are skipped, while the first and the last tile of a run need one more tile of keys each. Each number is
written by one program in one order, so a step is reproducible to the bit. A window wider than a tile, heads of 128 and
GPUs other than Hopper lack the registers for this: for these `_backward_wide` computes scores twice.

Shape legend: T packed tokens, N heads, H head width, E = H / 2 rotated pairs.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64
# Tiles that a program of the backward kernel walks over, as long as at least this many programs remain: eight times as
# many as run at once on a Hopper GPU, two on each of 132 multiprocessors
LONGEST_RUN, MIN_PROGRAMS = 8, 2048
LN_2 = tl.constexpr(math.log(2))


# Launch options by kernel and capability, for heads up to a width: warps, pipeline stages, and the register limit of a
# thread, if any. Chosen by what Triton 3.7 and its ptxas use for heads of that width in bf16, rotated, without timing.
# The comments give registers, bytes spilled, KiB of shared memory, and the resulting blocks and warps on a
# multiprocessor. tests/cuda_build/triton_kernels.py counts them
LAUNCH: dict[tuple[str, int], dict[int, tuple[int, int, int | None]]] = {
    ("_forward", 8): {128: (4, 2, None)},  # 64: 255, 8, 32: 2 blocks, 8 warps
    ("_forward", 9): {
        64: (4, 3, 168),  # 151, 0, 72: 3 blocks, 12 warps; above 168 registers only 2 fit
        128: (4, 1, None),  # 190, 0, 48: 2 blocks, 8 warps
    },
    ("_forward", 10): {128: (8, 1, None)},  # 64: 73, 0, 24: 3 blocks, 24 warps; with 4 warps 16
    ("_backward", 9): {64: (4, 1, None)},  # 255, 16, 40: 2 blocks, 8 warps; with 8 warps only 1 block fits
    ("_backward_wide", 8): {128: (4, 2, None)},  # 64: 255, 40, 49: 2 blocks, 8 warps
    ("_backward_wide", 9): {
        64: (4, 1, None),  # 244, 0, 40: 2 blocks, 8 warps; with 2 stages it spills
        128: (8, 1, None),  # 255, 48, 72: 1 block, 8 warps
    },
    ("_backward_wide", 10): {128: (8, 1, None)},  # 64: 122, 0, 40: 2 blocks, 16 warps
}


def launch_options(kernel: str, width: int, major: int) -> dict[str, int]:
    """Return the launch options of a kernel.

    Args:
        kernel: its name.
        width: of a head.
        major: the device's major compute capability; one missing from the table uses the newest older entry.
    """
    tuned_for = max(each for name, each in LAUNCH if name == kernel and each <= max(major, 8))
    by_width = LAUNCH[kernel, tuned_for]
    warps, stages, registers = by_width[min(widest for widest in by_width if widest >= width)]
    return {"num_warps": warps, "num_stages": stages} | ({} if registers is None else {"maxnreg": registers})


def walks(width: int, reach: int, major: int) -> bool:
    """Return True if `_backward` can run; wider heads and other GPUs lack the registers for its gradients."""
    return ("_backward", major) in LAUNCH and width <= max(LAUNCH["_backward", major]) and reach <= TILE


@functools.cache
def _major(device: torch.device) -> int:
    """Return the major capability of a GPU; Triton's interpreter uses the kernels of Hopper."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


@triton.jit
def _place(base, start, stride, LINES: tl.constexpr, WIDTH: tl.constexpr):
    """Return the addresses of a tile."""
    line = start + tl.arange(0, LINES)
    # 64 bits: 3 gradients of 12 heads of 64 are 2,304 numbers a token, and 2^31 of them only 932,067 tokens
    return base + line.to(tl.int64)[:, None] * stride + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _within(start, first, end, LINES: tl.constexpr):
    """Return a mask of the lines of a tile in [first, end)."""
    line = start + tl.arange(0, LINES) - first
    return line.to(tl.uint32) < tl.cast(end - first, tl.uint32)  # one comparison: lines before `first` wrap around


@triton.jit
def _load(base, start, stride, num_tokens, LINES: tl.constexpr, WIDTH: tl.constexpr):
    """Load a tile of one head, [LINES, WIDTH], with zeros before the first token and after the last."""
    inside = _within(start, 0, num_tokens, LINES)
    return tl.load(_place(base, start, stride, LINES, WIDTH), mask=inside[:, None], other=0.0)


@triton.jit
def _store(base, start, stride, first, end, values, LINES: tl.constexpr, WIDTH: tl.constexpr):
    """Store the lines of a tile in [first, end)."""
    pointers = _place(base, start, stride, LINES, WIDTH)
    tl.store(pointers, values.to(base.dtype.element_ty), mask=_within(start, first, end, LINES)[:, None])


@triton.jit
def _angles(cos_TE, sin_T2E, start, num_tokens, LINES: tl.constexpr, WIDTH: tl.constexpr):
    """Load cosines and sines of a tile in fp32, from the tables of `models.layers.rotary_tables`."""
    cos = _load(cos_TE, start, WIDTH // 2, num_tokens, LINES, WIDTH // 2)
    # the table has the negated sine and then the sine, for `rotate`; half of it is enough here
    sin = _load(sin_T2E + WIDTH // 2, start, WIDTH, num_tokens, LINES, WIDTH // 2)
    return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def _load_rotated(base, start, stride, num_tokens, cos_TE, sin_T2E, LINES: tl.constexpr, WIDTH: tl.constexpr):
    """Load a tile and rotate it in fp32, rounding once, as `models.layers.rotate` does. Without tables only load it."""
    if cos_TE is None:
        return _load(base, start, stride, num_tokens, LINES, WIDTH)
    else:
        E: tl.constexpr = WIDTH // 2
        cos, sin = _angles(cos_TE, sin_T2E, start, num_tokens, LINES, WIDTH)
        one = _load(base, start, stride, num_tokens, LINES, E).to(tl.float32)
        two = _load(base + E, start, stride, num_tokens, LINES, E).to(tl.float32)
        dtype = base.dtype.element_ty
        # join adds a last dimension, [LINES, E, 2]; a line of the buffer has its first half before its second
        halves = tl.join((one * cos - two * sin).to(dtype), (two * cos + one * sin).to(dtype))
        return halves.permute(0, 2, 1).reshape(LINES, WIDTH)


@triton.jit
def _store_rotated_back(
    base, start, stride, first, end, values, cos_TE, sin_T2E, LINES: tl.constexpr, WIDTH: tl.constexpr
):
    """Rotate a gradient back and store it."""
    if cos_TE is None:
        _store(base, start, stride, first, end, values, LINES, WIDTH)
    else:
        E: tl.constexpr = WIDTH // 2
        cos, sin = _angles(cos_TE, sin_T2E, start, end, LINES, WIDTH)
        one, two = values.reshape(LINES, 2, E).permute(0, 2, 1).split()
        # the transposed rotation: the sine changes its sign, and a factor of the tables (yarn) stays
        _store(base, start, stride, first, end, one * cos + two * sin, LINES, E)
        _store(base + E, start, stride, first, end, two * cos - one * sin, LINES, E)


@triton.jit
def _seen_by(first_T, end_T, start, num_tokens, BEFORE: tl.constexpr, AFTER: tl.constexpr, LINES: tl.constexpr):
    """Return, for each query of a tile, the first key it sees and the one after the last; no keys beyond the buffer."""
    query = start + tl.arange(0, LINES)
    inside = _within(start, 0, num_tokens, LINES)
    # a line outside the buffer sees the empty interval [num_tokens, 0), and so widens no loop over keys
    first = tl.load(first_T + query, mask=inside, other=num_tokens)
    end = tl.load(end_T + query, mask=inside, other=0)
    return tl.maximum(first, query - BEFORE), tl.minimum(end, query + AFTER + 1)


@triton.jit
def _forward(
    q_TNH,
    k_TNH,
    v_TNH,
    cos_TE,
    sin_T2E,
    out_TNH,
    lse_NT,
    qk_T2NH,
    first_T,
    end_T,
    num_tokens,
    heads,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    scale,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute one tile of queries of one head; `lse` is the base-2 logarithm of a query's sum of exponentials."""
    # heads of a tile run next to each other: they share the tables and the lines of one buffer
    head = tl.program_id(0) % heads
    start = tl.program_id(0) // heads * TILE
    q_TNH += head * q_head
    k_TNH += head * k_head
    v_TNH += head * v_head
    q = _load_rotated(q_TNH, start, q_token, num_tokens, cos_TE, sin_T2E, TILE, WIDTH)
    if cos_TE is not None:
        # for the backward pass; programs of neighbouring tiles rotate these keys again, since none can wait for another
        k = _load_rotated(k_TNH, start, k_token, num_tokens, cos_TE, sin_T2E, TILE, WIDTH)
        _store(qk_T2NH + head * WIDTH, start, 2 * heads * WIDTH, 0, num_tokens, q, TILE, WIDTH)
        _store(qk_T2NH + (heads + head) * WIDTH, start, 2 * heads * WIDTH, 0, num_tokens, k, TILE, WIDTH)
    first, end = _seen_by(first_T, end_T, start, num_tokens, BEFORE, AFTER, TILE)
    # softmax over tiles of keys one after the other (Milakov and Gimelshein 2018, arXiv:1805.02867), in fp32
    highest = tl.full((TILE,), -1e30, tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    out = tl.zeros((TILE, WIDTH), tl.float32)
    # only tiles with a visible key: three with a window of 64, fewer at the ends of short sequences. In Triton the 0 of
    # tl.min(first, 0) is an axis, not a bound
    for other in range(tl.min(first, 0) // TILE * TILE, tl.max(end, 0), TILE):
        k = _load_rotated(k_TNH, other, k_token, num_tokens, cos_TE, sin_T2E, TILE, WIDTH)
        v = _load(v_TNH, other, v_token, num_tokens, TILE, WIDTH)
        key = tl.arange(0, TILE)
        seen = (key[None, :] >= (first - other)[:, None]) & (key[None, :] < (end - other)[:, None])
        scores = tl.where(seen, tl.dot(q, tl.trans(k)), -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, 1) * scale)  # never infinite, so no weight becomes NaN
        weights = tl.exp2(scores * scale - higher[:, None])
        kept = tl.exp2(highest - higher)  # what remains of the sums so far under the new maximum
        total = total * kept + tl.sum(weights, 1)  # of unrounded weights: only the product below needs 16 bits
        out = tl.dot(weights.to(v.dtype), v, out * kept[:, None])
        highest = higher
    inside = _within(start, 0, num_tokens, TILE)
    total = tl.where(inside, total, 1.0)  # lines after the last token have no key, and would divide 0 by 0
    _store(out_TNH + head * WIDTH, start, heads * WIDTH, 0, num_tokens, out / total[:, None], TILE, WIDTH)
    tl.store(lse_NT + head * num_tokens + start + tl.arange(0, TILE), highest + tl.log2(total), mask=inside)


@triton.jit
def _delta(out_TNH, grad_TNH, start, out_token, grad_token, num_tokens, LINES: tl.constexpr, WIDTH: tl.constexpr):
    """Return the sum of out * grad of each query of a tile.

    It equals the sum over keys of weight * (grad . v), which the gradient of softmax subtracts, without a second pass
    over the keys (Dao et al. 2022, arXiv:2205.14135, appendix B.2).
    """
    out = _load(out_TNH, start, out_token, num_tokens, LINES, WIDTH).to(tl.float32)
    return tl.sum(out * _load(grad_TNH, start, grad_token, num_tokens, LINES, WIDTH).to(tl.float32), 1)


@triton.jit
def _meet(
    q_TNH,
    grad_TNH,
    lse_NT,
    first_T,
    end_T,
    start,
    other,
    k,
    v,
    delta,
    dq,
    dk,
    dv,
    num_tokens,
    q_token,
    grad_token,
    scale,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    OF_KEYS: tl.constexpr,
):
    """Add the contribution of one pair of tiles (queries from `start`, keys from `other`) to dq, dk and dv.

    Without OF_KEYS dk and dv are returned unchanged.
    """
    q = _load(q_TNH, start, q_token, num_tokens, TILE, WIDTH)
    grad = _load(grad_TNH, start, grad_token, num_tokens, TILE, WIDTH)
    inside = _within(start, 0, num_tokens, TILE)
    lse = tl.load(lse_NT + start + tl.arange(0, TILE), mask=inside, other=0.0)
    first, end = _seen_by(first_T, end_T, start, num_tokens, BEFORE, AFTER, TILE)
    key = tl.arange(0, TILE)
    seen = (key[None, :] >= (first - other)[:, None]) & (key[None, :] < (end - other)[:, None])
    # probabilities at once, by the saved log-sum-exp, so pairs of tiles may come in any order; the power of a hidden
    # pair may be infinite, and is replaced rather than multiplied by 0
    weights = tl.where(seen, tl.exp2(tl.dot(q, tl.trans(k)) * scale - lse[:, None]), 0.0)
    if OF_KEYS:
        dv = tl.dot(tl.trans(weights.to(q.dtype)), grad, dv)
    # gradient of the scores before they are scaled; dq and dk are scaled once, when they are stored
    moved = (weights * (tl.dot(grad, tl.trans(v)) - delta[:, None])).to(q.dtype)
    if OF_KEYS:
        dk = tl.dot(tl.trans(moved), q, dk)
    return tl.dot(moved, k, dq), dk, dv


@triton.jit
def _backward(
    q_TNH,
    k_TNH,
    v_TNH,
    cos_TE,
    sin_T2E,
    out_TNH,
    grad_TNH,
    grad_T3NH,
    lse_NT,
    delta_PR,
    first_T,
    end_T,
    num_tokens,
    heads,
    run,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    grad_token,
    grad_head,
    scale,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute all gradients of `run` neighbouring tiles, with a window no wider than a tile on each side."""
    head = tl.program_id(0) % heads
    begin = tl.program_id(0) // heads * TILE * run
    stop = tl.minimum(begin + run * TILE, num_tokens)
    q_TNH += head * q_head
    k_TNH += head * k_head
    v_TNH += head * v_head
    grad_TNH += head * grad_head
    out_TNH += head * WIDTH
    lse_NT += head * num_tokens
    grad_T3NH += head * WIDTH
    token = 3 * heads * WIDTH
    tile = tl.arange(0, TILE)
    nothing = tl.zeros((TILE, WIDTH), tl.float32)

    # deltas of all queries of this run and its neighbours first, while registers are free; only this program reads them
    delta_PR += tl.program_id(0).to(tl.int64) * (run + 2) * TILE + TILE  # of `begin`; one tile more on either side
    for start in range(begin - TILE, tl.cdiv(stop, TILE) * TILE + TILE, TILE):
        delta = _delta(out_TNH, grad_TNH, start, heads * WIDTH, grad_token, num_tokens, TILE, WIDTH)
        tl.store(delta_PR + start - begin + tile, delta)
    tl.debug_barrier()  # other threads of the program read them than wrote them

    # Keys of tile i meet queries of tiles i - 1, i and i + 1. A window is no wider than a tile, so dq of tile i - 1 is
    # complete after keys i, and two tiles of dq in registers are enough. First, keys before the run with its first tile
    k = _load(k_TNH, begin - TILE, k_token, num_tokens, TILE, WIDTH)
    v = _load(v_TNH, begin - TILE, v_token, num_tokens, TILE, WIDTH)
    dq_before = nothing  # gradients of the previous tile of queries, and of the one with the same tokens as the keys
    dq_here, _, _ = _meet(
        q_TNH, grad_TNH, lse_NT, first_T, end_T, begin, begin - TILE, k, v, tl.load(delta_PR + tile), nothing, nothing,
        nothing, num_tokens, q_token, grad_token, scale, BEFORE, AFTER, TILE, WIDTH, False,
    )  # fmt: skip
    for start in range(begin, stop, TILE):
        k = _load(k_TNH, start, k_token, num_tokens, TILE, WIDTH)
        v = _load(v_TNH, start, v_token, num_tokens, TILE, WIDTH)
        delta = tl.load(delta_PR + start - begin - TILE + tile)
        dq_before, dk, dv = _meet(
            q_TNH, grad_TNH, lse_NT, first_T, end_T, start - TILE, start, k, v, delta, dq_before, nothing, nothing,
            num_tokens, q_token, grad_token, scale, BEFORE, AFTER, TILE, WIDTH, True,
        )  # fmt: skip
        # queries before `begin` are another program's, and are not stored. LN_2 takes back the 1 / ln 2 in `scale`
        _store_rotated_back(
            grad_T3NH, start - TILE, token, begin, stop, dq_before * scale * LN_2, cos_TE, sin_T2E, TILE, WIDTH
        )
        delta = tl.load(delta_PR + start - begin + tile)
        dq_before, dk, dv = _meet(
            q_TNH, grad_TNH, lse_NT, first_T, end_T, start, start, k, v, delta, dq_here, dk, dv,
            num_tokens, q_token, grad_token, scale, BEFORE, AFTER, TILE, WIDTH, True,
        )  # fmt: skip
        delta = tl.load(delta_PR + start - begin + TILE + tile)
        dq_here, dk, dv = _meet(
            q_TNH, grad_TNH, lse_NT, first_T, end_T, start + TILE, start, k, v, delta, nothing, dk, dv,
            num_tokens, q_token, grad_token, scale, BEFORE, AFTER, TILE, WIDTH, True,
        )  # fmt: skip
        _store_rotated_back(
            grad_T3NH + heads * WIDTH, start, token, begin, stop, dk * scale * LN_2, cos_TE, sin_T2E, TILE, WIDTH
        )
        _store(grad_T3NH + 2 * heads * WIDTH, start, token, begin, stop, dv, TILE, WIDTH)
    # the last queries of the run also see keys of the tile behind it, whose own gradients are another program's
    behind = tl.cdiv(stop, TILE) * TILE
    k = _load(k_TNH, behind, k_token, num_tokens, TILE, WIDTH)
    v = _load(v_TNH, behind, v_token, num_tokens, TILE, WIDTH)
    delta = tl.load(delta_PR + behind - TILE - begin + tile)
    dq_before, _, _ = _meet(
        q_TNH, grad_TNH, lse_NT, first_T, end_T, behind - TILE, behind, k, v, delta, dq_before, nothing, nothing,
        num_tokens, q_token, grad_token, scale, BEFORE, AFTER, TILE, WIDTH, False,
    )  # fmt: skip
    _store_rotated_back(
        grad_T3NH, behind - TILE, token, begin, stop, dq_before * scale * LN_2, cos_TE, sin_T2E, TILE, WIDTH
    )


@triton.jit
def _backward_wide(
    q_TNH,
    k_TNH,
    v_TNH,
    cos_TE,
    sin_T2E,
    out_TNH,
    grad_TNH,
    grad_T3NH,
    lse_NT,
    first_T,
    end_T,
    num_tokens,
    heads,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    grad_token,
    grad_head,
    scale,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute the gradients of one tile, as queries over visible keys, then as keys over the queries that see them."""
    head = tl.program_id(0) % heads
    own = tl.program_id(0) // heads * TILE
    q_TNH += head * q_head
    k_TNH += head * k_head
    v_TNH += head * v_head
    grad_TNH += head * grad_head
    out_TNH += head * WIDTH
    lse_NT += head * num_tokens
    grad_T3NH += head * WIDTH
    token = 3 * heads * WIDTH
    nothing = tl.zeros((TILE, WIDTH), tl.float32)
    first, end = _seen_by(first_T, end_T, own, num_tokens, BEFORE, AFTER, TILE)
    delta = _delta(out_TNH, grad_TNH, own, heads * WIDTH, grad_token, num_tokens, TILE, WIDTH)
    dq = nothing
    for other in range(tl.min(first, 0) // TILE * TILE, tl.max(end, 0), TILE):
        k = _load(k_TNH, other, k_token, num_tokens, TILE, WIDTH)
        v = _load(v_TNH, other, v_token, num_tokens, TILE, WIDTH)
        dq, _, _ = _meet(
            q_TNH, grad_TNH, lse_NT, first_T, end_T, own, other, k, v, delta, dq, nothing, nothing,
            num_tokens, q_token, grad_token, scale, BEFORE, AFTER, TILE, WIDTH, False,
        )  # fmt: skip
    _store_rotated_back(grad_T3NH, own, token, 0, num_tokens, dq * scale * LN_2, cos_TE, sin_T2E, TILE, WIDTH)
    # the queries that see a key are the keys it would see through the mirrored window
    first, end = _seen_by(first_T, end_T, own, num_tokens, AFTER, BEFORE, TILE)
    k = _load(k_TNH, own, k_token, num_tokens, TILE, WIDTH)
    v = _load(v_TNH, own, v_token, num_tokens, TILE, WIDTH)
    dk = nothing
    dv = nothing
    for other in range(tl.min(first, 0) // TILE * TILE, tl.max(end, 0), TILE):
        delta = _delta(out_TNH, grad_TNH, other, heads * WIDTH, grad_token, num_tokens, TILE, WIDTH)
        _, dk, dv = _meet(
            q_TNH, grad_TNH, lse_NT, first_T, end_T, other, own, k, v, delta, nothing, dk, dv,
            num_tokens, q_token, grad_token, scale, BEFORE, AFTER, TILE, WIDTH, True,
        )  # fmt: skip
    _store_rotated_back(
        grad_T3NH + heads * WIDTH, own, token, 0, num_tokens, dk * scale * LN_2, cos_TE, sin_T2E, TILE, WIDTH
    )
    _store(grad_T3NH + 2 * heads * WIDTH, own, token, 0, num_tokens, dv, TILE, WIDTH)


def _grid(tokens: int, heads: int, run: int = 1) -> tuple[int]:
    # one dimension: CUDA limits the others to 65,535 blocks
    return (triton.cdiv(tokens, TILE * run) * heads,)


def _strides(*tensors: Tensor) -> list[int]:
    """Return the strides of tokens and heads of each tensor."""
    assert all(each.stride(-1) == 1 for each in tensors)
    return [stride for tensor in tensors for stride in tensor.stride()[:2]]


def forward(
    q_TNH: Tensor,
    k_TNH: Tensor,
    v_TNH: Tensor,
    first_T: Tensor,
    end_T: Tensor,
    before: int,
    after: int,
    cos_TE: Tensor | None = None,
    sin_T2E: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention.

    Args:
        q_TNH, k_TNH, v_TNH: in bf16 or fp16, any strides but in the last dimension.
        first_T, end_T: int32, for each token the first token of its sequence and the one after the last.
        before, after: tokens that a token sees on each side.
        cos_TE, sin_T2E: rotary tables for q and k; None: they are already rotated.

    Returns:
        out_TNH; lse_NT, for each query and head the base-2 logarithm of the sum of its exponentials; qk_T2NH, rotated q
        and k, empty without tables.
    """
    tokens, heads, width = q_TNH.shape
    out_TNH, lse_NT = q_TNH.new_empty(q_TNH.shape), q_TNH.new_empty((heads, tokens), dtype=torch.float32)
    qk_T2NH = q_TNH.new_empty((0 if cos_TE is None else tokens, 2, heads, width))
    # GPUs have an instruction for 2^x and none for e^x: scores are divided by ln 2 together with sqrt(H)
    _forward[_grid(tokens, heads)](
        q_TNH, k_TNH, v_TNH, *_tables(cos_TE, sin_T2E), out_TNH, lse_NT, qk_T2NH, first_T, end_T, tokens, heads,
        *_strides(q_TNH, k_TNH, v_TNH), width**-0.5 / math.log(2), before, after, width, TILE,
        **launch_options("_forward", width, _major(q_TNH.device)),
    )  # fmt: skip
    return out_TNH, lse_NT, qk_T2NH


def backward(
    grad_TNH: Tensor,
    q_TNH: Tensor,
    k_TNH: Tensor,
    v_TNH: Tensor,
    out_TNH: Tensor,
    lse_NT: Tensor,
    first_T: Tensor,
    end_T: Tensor,
    before: int,
    after: int,
    cos_TE: Tensor | None = None,
    sin_T2E: Tensor | None = None,
) -> Tensor:
    """Compute grad_T3NH, the gradients of queries, keys and values in one buffer.

    Args:
        grad_TNH: of `out_TNH`, with any strides but in the last dimension.
        q_TNH, k_TNH: rotated, if there are tables.
        v_TNH: as passed to `forward`.
        out_TNH, lse_NT: as `forward` returned them.
        first_T, end_T, before, after: see `forward`.
        cos_TE, sin_T2E: rotary tables; the gradients are then by q and k before rotation.
    """
    tokens, heads, width = q_TNH.shape
    grad_T3NH = q_TNH.new_empty((tokens, 3, heads, width))  # not zeroed: one program writes each number, once
    tensors = [q_TNH, k_TNH, v_TNH, *_tables(cos_TE, sin_T2E), out_TNH, grad_TNH, grad_T3NH, lse_NT]
    shape: list[Any] = [*_strides(q_TNH, k_TNH, v_TNH, grad_TNH), width**-0.5 / math.log(2), before, after, width, TILE]
    major = _major(q_TNH.device)
    if walks(width, max(before, after), major):
        # a longer run repeats fewer products at its ends, but too few programs leave multiprocessors idle
        run = max(1, min(LONGEST_RUN, triton.cdiv(tokens, TILE) * heads // MIN_PROGRAMS))
        grid = _grid(tokens, heads, run)
        delta_PR = lse_NT.new_empty((grid[0], (run + 2) * TILE))
        options = launch_options("_backward", width, major)
        _backward[grid](*tensors, delta_PR, first_T, end_T, tokens, heads, run, *shape, **options)
    else:
        options = launch_options("_backward_wide", width, major)
        _backward_wide[_grid(tokens, heads)](*tensors, first_T, end_T, tokens, heads, *shape, **options)
    return grad_T3NH


def _tables(cos_TE: Tensor | None, sin_T2E: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Check that tables have the strides that the kernels support."""
    assert cos_TE is None or (cos_TE.is_contiguous() and sin_T2E is not None and sin_T2E.is_contiguous())
    return cos_TE, sin_T2E
