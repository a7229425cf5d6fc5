"""StableAdamW in Triton kernels: the step of torch's operations. Triton's interpreter runs them without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="Triton is not installed; it comes with CUDA builds of torch")

from modernbert_train.optim import fused
from modernbert_train.optim.stable_adamw import StableAdamW
from tests.support.optimizer_steps import make_grads, make_params, step_with
from tests.support.triton_kernels import interpret_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(7, 5), (1,), (fused.CHUNK + 3,), (2, fused.CHUNK), (33,)]
ALIGNED = [(7, 4), (8,), (fused.CHUNK + 4,), (2, fused.CHUNK), (36,)]  # what accesses of 16 bytes divide
SETTINGS = {"betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.02, "max_lr": 1e-2}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_kernels(fused, monkeypatch)


def make(use_kernels: bool, shapes: Sequence[tuple[int, ...]] = SHAPES) -> tuple[list[nn.Parameter], StableAdamW]:
    params = [nn.Parameter(each.to(DEVICE)) for each in make_params(shapes)]
    groups = [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.0}]
    return params, StableAdamW(groups, 3e-3, fused=use_kernels, **SETTINGS)  # type: ignore[arg-type]


def step(params: list[nn.Parameter], optimizer: StableAdamW, number: int) -> None:
    grads = make_grads([tuple(param.shape) for param in params], number, 100.0)
    for grad in grads if number == 3 else ():
        grad.view(-1)[:1] *= 1e3  # clipped
    step_with(optimizer, params, grads)


@pytest.mark.parametrize("shapes", [SHAPES, ALIGNED])
def test_kernels_take_the_step_of_the_operations(shapes: Sequence[tuple[int, ...]]) -> None:
    """Weights, moments and both norms, over clipped steps, decay, tensors of many chunks and of one weight."""
    (ours, kernels), (expected, operations) = make(True, shapes), make(False, shapes)
    for number in range(6):
        step(ours, kernels, number)
        step(expected, operations, number)
        for name in ("last_grad_norm", "last_update_norm"):
            torch.testing.assert_close(getattr(kernels, name), getattr(operations, name), rtol=2e-6, atol=0)
    for mine, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-6, atol=2e-7)
        for key in ("exp_avg", "exp_avg_sq"):
            found, wanted = kernels.state[mine][key], operations.state[other][key]
            torch.testing.assert_close(found, wanted, rtol=2e-6, atol=1e-6 * float(wanted.abs().max()))


def test_an_empty_shard_adds_nothing_and_a_part_counts_as_one() -> None:
    """With more ranks than rows a rank holds none of a weight; the mean is over the whole weight all the same."""
    sizes, whole = [0, 3, 0], [10, 12, 5]
    tensors = [[torch.full((size,), 2.0, device=DEVICE) for size in sizes] for _ in range(4)]
    layout = fused.TensorTable.of(sizes, whole, torch.device(DEVICE))
    places = fused.addresses(*tensors)
    sums_3P = fused.move_moments(places, layout, new1=1.0, new2=1.0, eps=1e-6, decay=0.5)
    expected = torch.tensor([[0, 3 / 12, 0], [0, 12, 0], [0, 3 * 2.0**2, 0]], dtype=torch.float64)  # 2/2 + 0.5 * 2
    torch.testing.assert_close(sums_3P.cpu(), expected, rtol=1e-5, atol=0)
    assert tensors[3][1].tolist() == [4.0] * 3
    fused.apply_updates(places, layout, torch.tensor([9.0, 0.25, 9.0], device=DEVICE), eps=1e-6, decay=0.5)
    assert tensors[0][1].tolist() == pytest.approx([2 - 0.25 * 2] * 3, rel=1e-5)


def test_wide_accesses_are_for_tensors_that_they_fit() -> None:
    """Elsewhere a GPU stops at the first one. Gradients may begin anywhere in a bucket of DDP, and end anywhere."""
    whole, bucket = torch.zeros(8, device=DEVICE), torch.zeros(12, device=DEVICE)
    assert fused.addresses([whole], [bucket[4:]]).aligned
    assert not fused.addresses([whole], [bucket[1:9]]).aligned
    assert not fused.addresses([whole[:6]], [bucket[:6]]).aligned


def test_two_runs_have_the_same_bits() -> None:
    runs = [make(True) for _ in range(2)]
    for params, optimizer in runs:
        for number in range(3):
            step(params, optimizer, number)
    for one, other in zip(runs[0][0], runs[1][0], strict=True):
        assert torch.equal(one, other)


def test_a_nan_reaches_its_weights_and_no_others() -> None:
    """It must be seen, not clipped away."""
    params, optimizer = make(True)
    step(params, optimizer, 0)
    before = [param.detach().clone() for param in params]
    for index, param in enumerate(params):
        param.grad = torch.zeros_like(param)
        if index == 2:
            param.grad[fused.CHUNK + 1] = float("nan")
    optimizer.step()
    assert params[2].isnan().all() and optimizer.last_grad_norm.isnan()
    assert all(torch.isfinite(param).all() for index, param in enumerate(params) if index != 2)
    assert not torch.equal(params[0], before[0])


def test_what_the_kernels_cannot_take_is_refused() -> None:
    param = nn.Parameter(torch.zeros(4, 3, device=DEVICE).t())
    optimizer = StableAdamW([param], 1e-3, fused=True)
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match=r"strides \(1, 3\) \(optim.fused\): .*Set optim.fused=false"):
        optimizer.step()
