"""Every attention kernel that a GPU offers against `sdpa` in fp32: `pytest -m gpu`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from modernbert_train.batch import Order
from modernbert_train.config.schema import DebertaConfig
from modernbert_train.models.attention import KERNELS, flash, sdpa
from modernbert_train.models.attention.visible import Visible
from tests.support.attention import given, packed
from tests.support.encoders import build
from tests.support.gpu_parts import DEVICE, GPU_TEST, need_kernel

pytestmark = GPU_TEST

# relative error of a gradient: rounding of the inputs and of the scores, with a margin
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 4e-3}


@pytest.mark.parametrize("order", ["all", "causal", "given"])
@pytest.mark.parametrize("window", [True, False])
@pytest.mark.parametrize(
    ("lengths", "spare"), [([1, 64, 65, 128, 129, 300], 5), ([1024, 1, 1023, 6144], 0), ([8192], 3)], ids=str
)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, dtype) for name in ("varlen", "flash") for dtype in (torch.bfloat16, torch.float16)),
        *(("flex", dtype) for dtype in (torch.bfloat16, torch.float32)),  # two, because each line of these is compiled
    ],
    ids=str,
)
def test_kernel_equals_sdpa(
    name: str, dtype: torch.dtype, lengths: list[int], spare: int, window: bool, order: Order
) -> None:
    """The fast kernel must equal the reference, at the window's edge and across boundaries."""
    kernel = KERNELS[name]
    flash.switch_back()  # or `varlen` were the third after `flash`
    if (reason := kernel.support(DEVICE, dtype, order)) is not None:
        pytest.skip(reason)
    line = (given if order == "given" else packed)(lengths, spare).to(DEVICE)
    visible = Visible.around(64, order)
    qkv = torch.randn(sum(lengths), 3, 2, 64, device=DEVICE).to(dtype).requires_grad_()
    out = kernel.attend(*qkv.unbind(1), kernel.prepare(line, visible), window)
    (grad,) = torch.autograd.grad(out.float().square().sum(), qkv)
    exact = qkv.detach().float().requires_grad_()
    expected = sdpa.attend(*exact.unbind(1), sdpa.prepare(line, visible), window)
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), exact)
    torch.testing.assert_close(out.float(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    for part, expected_part in zip(grad.float().unbind(1), expected_grad.unbind(1), strict=True):
        assert (part - expected_part).norm() < TOLERANCES[dtype] * expected_part.norm()


@pytest.mark.parametrize("name", KERNELS)
def test_a_token_sees_64_to_each_side_and_no_more(name: str) -> None:
    """local_attention=128 includes distance 64 and excludes 65, for any kernel."""
    need_kernel(name, bf16=True)
    kernel = KERNELS[name]
    q, k, v = torch.randn(3, 300, 1, 64, device=DEVICE, dtype=torch.bfloat16)
    v.requires_grad_()
    out = kernel.attend(q, k, v, kernel.prepare(packed([300], 0).to(DEVICE), Visible.around(64)), window=True)
    (grad,) = torch.autograd.grad(out[150].float().sum(), v)
    assert grad.abs().sum((1, 2)).nonzero().flatten().tolist() == list(range(150 - 64, 150 + 65))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_flex_looks_up_what_sdpa_adds(dtype: torch.dtype) -> None:
    """A DeBERTa's distances: the tables that the kernel reads get the gradients of the bias written out."""
    config = DebertaConfig(
        vocab_size=160, hidden_size=128, num_layers=1, num_heads=2, intermediate_size=128, max_positions=1024,
        init_std=0.1, dropout=0.0,
    )  # fmt: skip
    line = packed([1, 64, 65, 128, 129, 300, 700]).to(DEVICE)
    line = replace(line, input_ids_T=torch.arange(len(line.input_ids_T), device=DEVICE) % 160)
    found = []
    for name in ("flex", "sdpa"):
        model = build(config, attention=name).to(DEVICE)
        with torch.autocast("cuda", dtype, enabled=name == "flex" and dtype != torch.float32):
            hidden_TD = model.encode(line)
        hidden_TD.float().square().sum().backward()
        found.append((hidden_TD, {each: parameter.grad for each, parameter in model.model.named_parameters()}))
    (ours, grads), (expected, expected_grads) = found
    torch.testing.assert_close(ours.float(), expected, atol=10 * TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    for each in ("distances.weight", "layers.0.attn.Wqkv.weight"):
        error = grads[each] - expected_grads[each]
        assert error.norm() < 2 * TOLERANCES[dtype] * expected_grads[each].norm(), each
