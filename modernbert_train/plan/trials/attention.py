"""A few short sequences through each attention kernel and back, against attention written out in fp64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from modernbert_train.batch import Packed
from modernbert_train.models.attention import KERNELS, with_backend
from modernbert_train.models.attention.visible import Visible

TOLERANCES = {torch.float32: 4e-3, torch.bfloat16: 2e-2}  # relative; in fp32 a kernel on a GPU may use TF32
LENGTHS = (1, 63, 64, 65, 7)  # beside and on the bounds of blocks
HALF_WINDOW = 16


def usual() -> tuple[torch.device, torch.dtype]:
    """The device that a run takes here, and the precision of its attention there."""
    on_gpu = torch.cuda.is_available()
    return (torch.device("cuda"), torch.bfloat16) if on_gpu else (torch.device("cpu"), torch.float32)


def try_attention(name: str) -> str:
    """Global and local attention of a kernel.

    Raises:
        ArithmeticError: an output or a gradient is wrong.
    """
    kernel, (device, dtype) = KERNELS[name], usual()
    batch = small_batch().to(device)
    generator = torch.Generator().manual_seed(0)
    weight_TNH = torch.randn(sum(LENGTHS), 2, 64, generator=generator)
    worst = 0.0
    for window in (False, True):
        qkv = torch.randn(sum(LENGTHS), 3, 2, 64, generator=generator).to(dtype).to(device).requires_grad_()
        q_TNH, k_TNH, v_TNH = qkv.unbind(1)
        out = kernel.attend(q_TNH, k_TNH, v_TNH, kernel.prepare(batch, Visible.around(HALF_WINDOW)), window)
        (grad,) = torch.autograd.grad((out.float() * weight_TNH.to(device)).sum(), qkv)
        exact = qkv.detach().double().cpu().requires_grad_()
        expected = written_out(exact[:, 0], exact[:, 1], exact[:, 2], window)
        (expected_grad,) = torch.autograd.grad((expected * weight_TNH).sum(), exact)
        worst = max(worst, require_equal([out, grad], [expected, expected_grad], TOLERANCES[dtype]))
    took = with_backend(kernel, device, dtype)
    calls = f", by {took.removeprefix(name).strip(' ()')}" if took != name else ""
    return f"within {worst:.0e} of attention written out{calls}; {kernel.traits}"


def small_batch() -> Packed:
    """The boundaries of LENGTHS."""
    total = sum(LENGTHS)
    cu_seqlens_S = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist(), total], dtype=torch.int32)
    position_T = torch.cat([torch.arange(length) for length in LENGTHS])
    return Packed(position_T, position_T, cu_seqlens_S, max(LENGTHS))


def written_out(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, window: bool) -> Tensor:
    """Attention with a whole mask."""
    sequence_T = torch.repeat_interleave(torch.tensor(LENGTHS))
    position_T = torch.arange(len(sequence_T))
    visible_TT = sequence_T[:, None] == sequence_T
    if window:
        visible_TT &= (position_T[:, None] - position_T).abs() <= HALF_WINDOW
    scores_NTT = torch.einsum("qnh,knh->nqk", q_TNH, k_TNH) * q_TNH.shape[-1] ** -0.5
    return torch.einsum("nqk,knh->qnh", scores_NTT.masked_fill(~visible_TT, -torch.inf).softmax(-1), v_TNH)


def require_equal(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> float:
    """The largest relative difference of the norm.

    Raises:
        ArithmeticError: it is beyond the tolerance, or not a number.
    """
    pairs = [(a.detach().double().cpu(), b.detach().double().cpu()) for a, b in zip(found, expected, strict=True)]
    worst = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    if not all(float((a - b).norm() / b.norm()) <= tolerance for a, b in pairs):
        raise ArithmeticError(f"wrong by {worst:.1e} of the true values, where {tolerance:.0e} is rounding")
    return worst
