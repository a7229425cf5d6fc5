"""A plain implementation of attention and its gradients, and the small case on which kernels are compared with it.

`doctor` compares every kernel with it; FlashAttention-4 is compared before its first use in a process.
Shape legend: T packed tokens, N heads, H head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from modernbert_train.batch import Packed

# largest relative difference of norms that rounding explains; in fp32 a GPU kernel may use TF32
TOLERANCES = {torch.float32: 4e-3, torch.bfloat16: 2e-2, torch.float16: 2e-2}
LENGTHS = (1, 63, 64, 65, 7, 300)  # at the edges of a kernel's blocks, next to them, and longer than one block


def small_batch(empty: int = 1) -> Packed:
    """Return the boundaries of LENGTHS, followed by some empty sequences, as in every batch."""
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    cu_seqlens_S = torch.tensor([0, *ends, *[ends[-1]] * empty], dtype=torch.int32)
    position_T = torch.cat([torch.arange(length) for length in LENGTHS])
    return Packed(position_T, position_T, cu_seqlens_S, max(LENGTHS))


def written_out(
    q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, grad_TNH: Tensor, sides: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute attention within the sequences of LENGTHS with a full mask, and its gradients in closed form.

    Autograd is not used, so this also works inside a custom operator, where autograd is off.

    Args:
        q_TNH, k_TNH, v_TNH: inputs, usually fp64.
        grad_TNH: gradient of the output.
        sides: tokens visible before and after each token; negative for all of them.

    Returns:
        The output and the gradients of q, k and v.
    """
    before, after = sides
    scale = q_TNH.shape[-1] ** -0.5
    sequence_T = torch.repeat_interleave(torch.tensor(LENGTHS))
    position_T = torch.arange(len(sequence_T))
    ahead_TT = position_T - position_T[:, None]
    visible_TT = sequence_T[:, None] == sequence_T
    if before >= 0:
        visible_TT &= ahead_TT >= -before
    if after >= 0:
        visible_TT &= ahead_TT <= after
    scores_NTT = torch.einsum("qnh,knh->nqk", q_TNH, k_TNH) * scale
    p_NTT = scores_NTT.masked_fill(~visible_TT, -torch.inf).softmax(-1)
    out_TNH = torch.einsum("nqk,knh->qnh", p_NTT, v_TNH)
    dp_NTT = torch.einsum("qnh,knh->nqk", grad_TNH, v_TNH)
    ds_NTT = p_NTT * (dp_NTT - (p_NTT * dp_NTT).sum(-1, keepdim=True)) * scale
    return (
        out_TNH,
        torch.einsum("nqk,knh->qnh", ds_NTT, k_TNH),
        torch.einsum("nqk,qnh->knh", ds_NTT, q_TNH),
        torch.einsum("nqk,qnh->knh", p_NTT, grad_TNH),
    )


def differences(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """Return the norm of each difference, relative to the norm of the expected tensor.

    An expected RMS below 1e-4 counts as 1e-4: with a window of one token the gradients of q and k are zero.
    """
    pairs = [(a.detach().double().cpu(), b.detach().double().cpu()) for a, b in zip(actual, expected, strict=True)]
    return [float((a - b).norm()) / max(float(b.norm()), 1e-4 * b.numel() ** 0.5) for a, b in pairs]


def require_equal(actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> float:
    """Return the largest of `differences`.

    Raises:
        ArithmeticError: it is above the tolerance, or not a number.
    """
    relative = differences(actual, expected)
    if not all(each <= tolerance for each in relative):
        worst = max(relative, key=lambda each: float("inf") if each != each else each)
        raise ArithmeticError(f"wrong by {worst:.1e} of the true values, where {tolerance:.0e} is rounding")
    return max(relative)
