"""Local attention in tiles of 64 equals `sdpa`, forward and backward. Triton's interpreter runs it without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed; it comes with CUDA builds of torch")

from modernbert_train.models.attention import sdpa, tile_kernels, tiles
from modernbert_train.models.attention.visible import Visible
from modernbert_train.models.layers import attend_rotary, rotary_tables, rotated
from tests.support.attention import computed, inputs, packed
from tests.support.triton_kernels import interpret_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_kernels(tile_kernels, monkeypatch)


NEAR = dict.fromkeys(("atol", "rtol"), 2e-2 if DEVICE == "cuda" else 1e-5)  # TF32


CASES = pytest.mark.parametrize(
    ("lengths", "visible", "width"),
    [
        ([1], Visible.around(64), 16),
        ([64, 64], Visible.around(64), 16),  # the bounds of tiles
        ([63, 65, 1, 71], Visible.around(64), 64),  # several in a tile, and a tile that is not full
        ([200, 7], Visible.around(64), 32),  # longer than the window
        ([130, 60], Visible.around(8), 128),
        ([100, 120], Visible.around(100), 16),  # wider than a tile
        ([130, 60], Visible.around(64, "causal"), 16),
        ([130, 80], Visible.around(100, "causal"), 32),
        ([40, 90], Visible.around(0), 16),
    ],
    ids=str,
)


@CASES
def test_local_attention_is_that_of_sdpa(lengths: list[int], visible: Visible, width: int) -> None:
    """Or a token sees another document, or one outside its window; gradients would be wrong in silence."""
    line, (qkv, weight) = packed(lengths), inputs(sum(lengths), width)
    expected, expected_grad = computed(sdpa, qkv, weight, line, visible, True)
    out, grad = computed(tiles, qkv.to(DEVICE), weight.to(DEVICE), line.to(DEVICE), visible, True)
    torch.testing.assert_close(out.cpu(), expected, **NEAR)
    torch.testing.assert_close(grad.cpu(), expected_grad, **NEAR)


def test_rounding_is_that_of_half_precision() -> None:
    """Products of fp16 are added up in fp32: errors as large as the inputs' own rounding."""
    line, visible, (qkv, _) = packed([70, 58]), Visible.around(64), inputs(128, 64)
    expected = sdpa.attend(*qkv.unbind(1), sdpa.prepare(line, visible), True)
    out = tiles.attend(*qkv.half().to(DEVICE).unbind(1), tiles.prepare(line.to(DEVICE), visible), True)
    assert float((out.float().cpu() - expected).norm() / expected.norm()) < 1e-3


def rotated_both_ways(lengths: list[int], visible: Visible, width: int, dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    """Return output and gradient of a layer's attention, by `sdpa` in fp32 and by `tiles`; positions restart in each
    sequence."""
    line = packed(lengths)
    qkv, weight = (each.to(dtype) for each in inputs(sum(lengths), width))
    found = []
    for kernel, kind, device in ((sdpa, torch.float32, "cpu"), (tiles, dtype, DEVICE)):
        given = qkv.to(device, kind).requires_grad_()
        cos_TE, sin_T2E = rotary_tables(line.position_ids_T.to(device), 10_000.0, width, kind)
        tables = 1.25 * cos_TE, 1.25 * sin_T2E  # as yarn scales them
        out = attend_rotary(given, tables, kernel, kernel.prepare(line.to(device), visible), True)
        (grad,) = torch.autograd.grad(out, given, weight.to(device, kind))
        found.append((out.detach().cpu().float(), grad.cpu().float(), grad))
    return found


@CASES
def test_q_and_k_are_rotated_within(lengths: list[int], visible: Visible, width: int) -> None:
    """Positions or their gradients would belong to another token; and no copy follows the gradient's kernel."""
    (expected, expected_grad, _), (out, grad, made) = rotated_both_ways(lengths, visible, width, torch.float32)
    torch.testing.assert_close(out, expected, **NEAR)
    torch.testing.assert_close(grad, expected_grad, **NEAR)
    assert made.is_contiguous()


def test_rotation_is_rounded_once() -> None:
    """In fp16, output and gradient of q, k and v each within the rounding of a separate rotation: seen 4e-4 to 6e-4."""
    (expected, expected_grad, _), (out, grad, _) = rotated_both_ways([70, 58], Visible.around(64), 64, torch.float16)
    assert float((out - expected).norm() / expected.norm()) < 1e-3
    for part, expected_part in zip(grad.unbind(1), expected_grad.unbind(1), strict=True):
        assert float((part - expected_part).norm() / expected_part.norm()) < 1e-3


def test_rotated_q_and_k_are_those_of_the_separate_pass() -> None:
    """To the bit but for products that are fused with sums: the forward kernel keeps them for the backward one."""
    positions = torch.arange(130) * 37
    qkv = inputs(130, 64)[0].half().to(DEVICE)
    tables = rotary_tables(positions.to(DEVICE), 10_000.0, 64, torch.float16)
    bounds = tiles.bounds(packed([130]).to(DEVICE))
    _, _, qk = tile_kernels.forward(*qkv.unbind(1), *bounds, 64, 64, *tables)
    q, k, _ = rotated(qkv, *tables)
    expected = torch.stack((q, k), dim=1)
    assert (qk != expected).float().mean() < 1e-3
    torch.testing.assert_close(qk, expected, atol=0, rtol=2**-10)


@pytest.mark.parametrize("run", [1, 2, 3, 4])
def test_bits_do_not_depend_on_how_many_tiles_a_program_walks_over(run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does any tile go without its gradient at the ends of a run: one program takes as many as are worth it. The
    same pass again (4) gives the same bits too."""
    qkv, weight = (each.to(DEVICE) for each in inputs(251, 16))
    monkeypatch.setattr(tile_kernels, "MIN_PROGRAMS", 1)
    grads = []
    for longest in (4, run):
        monkeypatch.setattr(tile_kernels, "LONGEST_RUN", longest)
        grads.append(computed(tiles, qkv, weight, packed([150, 41, 60]).to(DEVICE), Visible.around(64), True)[1])
    assert torch.equal(*grads)


def test_a_narrow_window_and_a_wide_one_give_the_same_gradients() -> None:
    """Two kernels compute them; one sequence that a window of either width holds whole is the same to both."""
    qkv, weight = (each.to(DEVICE) for each in inputs(154, 16))
    line = packed([60, 64, 30]).to(DEVICE)
    grads = [computed(tiles, qkv, weight, line, Visible.around(half), True)[1] for half in (64, 65)]
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-5)
