"""StableAdamW on one device. If this breaks, runs no longer follow the release's optimizer, or resume differently."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import optimi  # type: ignore[import-untyped]
import pytest
import torch
from torch import Tensor, nn

from modernbert_train.optim.stable_adamw import StableAdamW
from tests.support import optimizer_steps
from tests.support.optimizer_steps import make_params, step_with

SHAPES = [(7, 5), (5,), (3, 4), (1,)]
LR, MAX_LR, BETAS, EPS, DECAY = 3e-3, 1e-2, (0.9, 0.98), 1e-6, 0.02


def make_grads(step: int) -> list[Tensor]:
    """Gradients of which the last is near eps; two spike a thousandfold at steps 6 and 13."""
    grads = optimizer_steps.make_grads(SHAPES, step, 100.0)
    if step in (6, 13):
        grads[0][2, 3] *= 1e3
        grads[3] *= 1e3
    return grads


def reference(steps: int) -> tuple[list[list[float]], list[float], list[float]]:
    """Element-by-element StableAdamW in python floats: weights, gradient norms and update norms after each step."""
    weights = [param.detach().flatten().tolist() for param in make_params(SHAPES)]
    ms = [[0.0] * len(w) for w in weights]
    vs = [[0.0] * len(w) for w in weights]
    grad_norms, update_norms = [], []
    for t in range(1, steps + 1):
        grads = [grad.flatten().tolist() for grad in make_grads(t)]
        b1, b2 = (b * (1 - b ** (t - 1)) / (1 - b**t) for b in BETAS)
        change_square = 0.0
        for w, m, v, g in zip(weights, ms, vs, grads, strict=True):
            for i, g_i in enumerate(g):
                m[i] = b1 * m[i] + (1 - b1) * g_i
                v[i] = b2 * v[i] + (1 - b2) * g_i**2
            rms = math.sqrt(sum(g_i**2 / max(v_i, EPS**2) for g_i, v_i in zip(g, v, strict=True)) / len(g))
            lr = LR / max(1.0, rms)
            for i in range(len(w)):
                old = w[i]
                w[i] = w[i] * (1 - lr / MAX_LR * DECAY) - lr * m[i] / (math.sqrt(v[i]) + EPS)
                change_square += (w[i] - old) ** 2
        grad_norms.append(math.sqrt(sum(g_i**2 for g in grads for g_i in g)))
        update_norms.append(math.sqrt(change_square))
    return weights, grad_norms, update_norms


def test_fp64_equals_the_equations_written_out() -> None:
    """Both norms span all groups; the release's covered its last one only, norms and biases."""
    weights, grad_norms, update_norms = reference(steps=20)
    params = make_params(SHAPES, torch.float64)
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    optimizer = StableAdamW(groups, LR, betas=BETAS, eps=EPS, weight_decay=DECAY, max_lr=MAX_LR)
    assert math.isnan(optimizer.last_grad_norm.item())
    for t in range(1, 21):
        step_with(optimizer, params, make_grads(t))
        assert optimizer.last_grad_norm.item() == pytest.approx(grad_norms[t - 1], rel=1e-6)
        assert optimizer.last_update_norm.item() == pytest.approx(update_norms[t - 1], rel=1e-6)
    for param, expected in zip(params, weights, strict=True):
        assert param.flatten().tolist() == pytest.approx(expected, rel=1e-11, abs=1e-13)


class PlainKernels:
    """The promise of optim/fused.py, one tensor at a time, without Triton."""

    TensorTable = SimpleNamespace(of=lambda sizes, global_sizes, device: global_sizes)

    @staticmethod
    def addresses(*columns: list[Tensor]) -> list[tuple[Tensor, ...]]:
        return list(zip(*columns, strict=True))

    @staticmethod
    def move_moments(
        table: list[tuple[Tensor, ...]], sizes: list[int], *, new1: float, new2: float, eps: float, decay: float
    ) -> Tensor:
        sums = []
        for (p, g, m, v), size in zip(table, sizes, strict=True):
            m.copy_((1 - new1) * m + new1 * g)
            v.copy_((1 - new2) * v + new2 * g**2)
            direction = m / (v.sqrt() + eps) + decay * p
            ratio = (g / v.sqrt().clamp(min=eps)).square().sum() / size
            sums.append(torch.stack([ratio, g.square().sum(), direction.square().sum()]).double())
        return torch.stack(sums, dim=1)

    @staticmethod
    def apply_updates(
        table: list[tuple[Tensor, ...]], sizes: list[int], rate_P: Tensor, *, eps: float, decay: float
    ) -> None:
        for (p, _, m, v), rate in zip(table, rate_P, strict=True):
            p.sub_(rate * (m / (v.sqrt() + eps) + decay * p))


def test_the_fused_form_gets_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Triton, no other test checks the kernels' arguments: decay, eps, rates, sizes, norms."""
    monkeypatch.setitem(sys.modules, "modernbert_train.optim.fused", PlainKernels)  # type: ignore[arg-type]
    runs = []
    for fused in (False, True):
        params = make_params(SHAPES, torch.float64)
        groups = [{"params": params[:2], "weight_decay": DECAY}, {"params": params[2:], "eps": 1e-3}]
        optimizer = StableAdamW(groups, LR, betas=BETAS, eps=EPS, max_lr=MAX_LR, fused=fused)
        for t in range(1, 8):
            step_with(optimizer, params, make_grads(t))
        runs.append([*params, optimizer.last_grad_norm, optimizer.last_update_norm])
    for plain, kernels in zip(*runs, strict=True):
        torch.testing.assert_close(kernels, plain, rtol=1e-6 if plain.dim() == 0 else 1e-11, atol=1e-13)


@pytest.mark.filterwarnings("ignore:You are using weight_decay")
@pytest.mark.parametrize("decay", [0.0, DECAY])
def test_equals_optimi(decay: float) -> None:
    """The release trained with this library; a difference would make its hyperparameters mean something else."""
    ours, theirs = make_params(SHAPES), make_params(SHAPES)
    optimizer = StableAdamW(ours, LR, betas=BETAS, eps=EPS, weight_decay=decay, max_lr=MAX_LR)
    optimi_optimizer = optimi.StableAdamW(
        theirs, lr=LR, betas=BETAS, eps=EPS, weight_decay=decay, decouple_lr=True, max_lr=MAX_LR, triton=False
    )
    for t in range(1, 21):
        step_with(optimizer, ours, make_grads(t))
        step_with(optimi_optimizer, theirs, make_grads(t))
        for our, their in zip(ours, theirs, strict=True):
            torch.testing.assert_close(our, their, rtol=1e-6, atol=3e-7)


def test_the_gradient_is_left_as_it_was() -> None:
    """Callbacks look at gradients after the step."""
    params = make_params(SHAPES)
    optimizer = StableAdamW(params, LR, weight_decay=DECAY)
    step_with(optimizer, params, make_grads(6))
    for param, grad in zip(params, make_grads(6), strict=True):
        assert param.grad is not None and torch.equal(param.grad, grad)


@pytest.mark.runs
def test_norms_of_large_tensors_are_exact() -> None:
    """One fp32 sum over an embedding is off in the fourth digit, and clips a little differently on each world size."""
    param = nn.Parameter(torch.zeros(16384, 512))
    param.grad = torch.rand(param.shape, generator=torch.Generator().manual_seed(0)) + 1
    exact = param.grad.double().norm().item()
    optimizer = StableAdamW([param], LR)
    optimizer.step()
    assert abs(torch._foreach_norm([param.grad])[0].item() / exact - 1) > 1e-5
    assert optimizer.last_grad_norm.item() == pytest.approx(exact, rel=3e-7)


def test_decay_follows_max_lr_of_the_group_not_of_construction() -> None:
    """Decay at the peak rate is weight_decay, for any rate at construction; gradients are zero here."""
    param = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = StableAdamW([param], 1e-3, weight_decay=0.01)
    assert optimizer.param_groups[0]["max_lr"] == 1e-3
    optimizer.param_groups[0].update(lr=1e-4, max_lr=2e-4)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert param.tolist() == pytest.approx([1 - 0.5 * 0.01] * 3, rel=1e-12)


def test_a_parameter_without_gradient_waits() -> None:
    """A head that joins late starts with its own first step, and is not decayed before."""
    params = make_params(SHAPES)
    optimizer = StableAdamW(params, LR, weight_decay=DECAY, max_lr=MAX_LR)
    late, late_before = params[1], params[1].detach().clone()
    for t in (1, 2):
        for param, grad in zip(params, make_grads(t), strict=True):
            param.grad = None if param is late else grad
        optimizer.step()
    assert torch.equal(late, late_before) and late not in optimizer.state
    step_with(optimizer, params, make_grads(3))
    assert optimizer.state[params[0]]["step"] == 3 and optimizer.state[late]["step"] == 1
    expected = nn.Parameter(late_before)
    step_with(StableAdamW([expected], LR, weight_decay=DECAY, max_lr=MAX_LR), [expected], [make_grads(3)[1]])
    torch.testing.assert_close(late, expected)


def test_the_closure_runs_once_with_gradients() -> None:
    """Composer computes the gradients inside the step."""
    param = nn.Parameter(torch.ones(2))
    optimizer = StableAdamW([param], LR)
    calls = []

    def closure() -> Tensor:
        loss = param.square().sum()
        loss.backward()
        calls.append(1)
        return loss

    loss = optimizer.step(closure)
    assert loss.item() == 2.0 and calls == [1] and (param < 1).all()


def test_a_nan_gradient_is_seen_in_the_norm_and_the_weights() -> None:
    params = make_params(SHAPES)
    optimizer = StableAdamW(params, LR)
    grads = make_grads(1)
    grads[0][0, 0] = math.nan
    step_with(optimizer, params, grads)
    assert optimizer.last_grad_norm.isnan() and params[0].isnan().all() and not params[1].isnan().any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": math.nan}, "lr=nan"),
        ({"lr": 0.0, "weight_decay": 0.1}, "max_lr=0.0"),
        ({"lr": 1e-3, "weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"lr": 1e-3, "betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\)"),
        ({"lr": 1e-3, "eps": 0.0}, "eps=0.0"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StableAdamW([nn.Parameter(torch.ones(1))], **settings)  # type: ignore[arg-type]


def test_low_precision_weights_are_refused() -> None:
    """bf16 weights would swallow most updates silently; also when the model was cast after construction."""
    with pytest.raises(ValueError, match="master weights must be float32"):
        StableAdamW([nn.Parameter(torch.ones(2, dtype=torch.bfloat16))], LR)
    layer = nn.Linear(2, 2)
    optimizer = StableAdamW(layer.parameters(), LR)
    layer.bfloat16()
    layer(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(ValueError, match="master weights must be float32"):
        optimizer.step()
