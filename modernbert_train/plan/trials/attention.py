"""Run a few short sequences through each attention kernel and back, compared with plain attention in fp64."""

from __future__ import annotations

import torch

from modernbert_train.models.attention import KERNELS, with_backend
from modernbert_train.models.attention.visible import Visible
from modernbert_train.models.attention.written_out import (
    LENGTHS,
    TOLERANCES,
    require_equal,
    small_batch,
    written_out,
)

HALF_WINDOW = 16


def usual() -> tuple[torch.device, torch.dtype]:
    """Return the device that a run uses here, and the precision of its attention there."""
    on_gpu = torch.cuda.is_available()
    return (torch.device("cuda"), torch.bfloat16) if on_gpu else (torch.device("cpu"), torch.float32)


def try_attention(name: str) -> str:
    """Try global and local attention of a kernel.

    Raises:
        ArithmeticError: an output or a gradient is wrong.
    """
    kernel, (device, dtype) = KERNELS[name], usual()
    batch, visible = small_batch().to(device), Visible.around(HALF_WINDOW)
    generator = torch.Generator().manual_seed(0)
    weight_TNH = torch.randn(sum(LENGTHS), 2, 64, generator=generator)
    worst = 0.0
    for window in (False, True):
        qkv = torch.randn(sum(LENGTHS), 3, 2, 64, generator=generator).to(dtype).to(device).requires_grad_()
        q_TNH, k_TNH, v_TNH = qkv.unbind(1)
        out = kernel.attend(q_TNH, k_TNH, v_TNH, kernel.prepare(batch, visible), window)
        (grad,) = torch.autograd.grad((out.float() * weight_TNH.to(device)).sum(), qkv)
        exact = qkv.detach().double().cpu().unbind(1)
        expected, *expected_grads = written_out(*exact, grad_TNH=weight_TNH.double(), sides=visible.sides(window))
        actual = [out, *grad.unbind(1)]
        worst = max(worst, require_equal(actual, [expected, *expected_grads], TOLERANCES[dtype]))
    took = with_backend(kernel, device, dtype)
    calls = f", by {took.removeprefix(name).strip(' ()')}" if took != name else ""
    return f"within {worst:.0e} of attention written out{calls}; {kernel.traits}"
