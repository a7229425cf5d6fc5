"""Local attention in tiles of 64: that of `sdpa`, forward and backward. Triton's interpreter runs it without a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with CUDA builds of torch")

from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from benchmarks.batches import lay_out
from modernbert_train.batch import Packed
from modernbert_train.models.attention import sdpa, tile_kernels, tiles
from modernbert_train.models.attention.visible import Visible

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """See tests/optim/test_fused.py."""
    if DEVICE == "cuda":
        return
    monkeypatch.setattr(JITFunction, "__call__", lambda self, *words, **named: interpret(self)(*words, **named))
    for name, kernel in vars(tile_kernels).copy().items():
        if isinstance(kernel, JITFunction):
            monkeypatch.setattr(tile_kernels, name, interpret(kernel))


def interpret(kernel: JITFunction) -> InterpretedFunction:
    return InterpretedFunction(kernel.fn)


def line_of(lengths: list[int]) -> Packed:
    total = sum(lengths)
    boundaries = [0, *torch.tensor(lengths).cumsum(0).tolist(), total, total]
    return lay_out(torch.zeros(total, dtype=torch.int64), boundaries)


@pytest.mark.parametrize(
    ("lengths", "visible", "width"),
    [
        ([1], Visible.around(64), 16),
        ([64, 64], Visible.around(64), 16),  # the bounds of tiles
        ([63, 65, 1, 71], Visible.around(64), 64),  # several in a tile, and a tile that is not full
        ([200, 7], Visible.around(64), 32),  # longer than the window
        ([130, 60], Visible.around(8), 16),
        ([100, 120], Visible.around(100), 16),  # wider than a tile
        ([130, 60], Visible.around(64, "causal"), 16),
        ([40, 90], Visible.around(0), 16),
    ],
    ids=str,
)
def test_local_attention_is_that_of_sdpa(lengths: list[int], visible: Visible, width: int) -> None:
    """Or a token sees another document, or one outside its window; gradients would be wrong in silence."""
    line, generator = line_of(lengths), torch.Generator().manual_seed(0)
    qkv = torch.randn(sum(lengths), 3, 2, width, generator=generator).requires_grad_()
    weight = torch.randn(sum(lengths), 2, width, generator=generator)
    expected = sdpa.attend(*qkv.unbind(1), sdpa.prepare(line, visible), True)
    (expected_grad,) = torch.autograd.grad((expected * weight).sum(), qkv)
    on_device = qkv.detach().to(DEVICE).requires_grad_()
    out = tiles.attend(*on_device.unbind(1), tiles.prepare(line.to(DEVICE), visible), True)
    (grad,) = torch.autograd.grad((out * weight.to(DEVICE)).sum(), on_device)
    near = {"atol": 2e-2, "rtol": 2e-2} if DEVICE == "cuda" else {"atol": 1e-5, "rtol": 1e-5}  # TF32
    torch.testing.assert_close(out.cpu(), expected, **near)
    torch.testing.assert_close(grad.cpu(), expected_grad, **near)


def test_rounding_is_that_of_half_precision() -> None:
    """Products of fp16 are added up in fp32: errors as large as the inputs' own rounding."""
    line, visible, generator = line_of([70, 58]), Visible.around(64), torch.Generator().manual_seed(0)
    qkv = torch.randn(128, 3, 2, 64, generator=generator)
    expected = sdpa.attend(*qkv.unbind(1), sdpa.prepare(line, visible), True)
    out = tiles.attend(*qkv.half().to(DEVICE).unbind(1), tiles.prepare(line.to(DEVICE), visible), True)
    assert float((out.float().cpu() - expected).norm() / expected.norm()) < 1e-3


def test_two_passes_give_the_same_bits() -> None:
    line, visible = line_of([100, 60]), Visible.around(64)
    qkv = torch.randn(160, 3, 2, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE).requires_grad_()
    layout = tiles.prepare(line.to(DEVICE), visible)
    grads = []
    for _ in range(2):
        (grad,) = torch.autograd.grad(tiles.attend(*qkv.unbind(1), layout, True).square().sum(), qkv)
        grads.append(grad)
    assert torch.equal(*grads)
