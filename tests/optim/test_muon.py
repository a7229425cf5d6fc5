"""Muon and NorMuon, whole and in shards. If this breaks, matrices move otherwise than published, or by rank count."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode

from modernbert_train.clock import Clock
from modernbert_train.config.schema import (
    VARIANTS,
    ModernBertConfig,
    MuonConfig,
    NorMuonConfig,
    OptimConfig,
    PhaseConfig,
    RunConfig,
    StableAdamWConfig,
)
from modernbert_train.models.modernbert import ModernBertForMaskedLM
from modernbert_train.models.sharding import like
from modernbert_train.optim.groups import weights_of
from modernbert_train.optim.muon import SCALES, Muon, Rule, share_out
from modernbert_train.optim.optimizers import apply_clock, build_optimizer
from modernbert_train.optim.stable_adamw import StableAdamW
from modernbert_train.plan.census import census
from modernbert_train.plan.flops import optimizer_flops
from modernbert_train.plan.memory import moment_numbers
from modernbert_train.plan.parameters import count_parameters
from modernbert_train.weights.gather import gather_optimizer, gather_weights, load_optimizer, load_weights
from tests.support.gloo import run_ranks
from tests.support.optimizer_steps import make_grads, make_params, step_with
from tests.support.toy_optimizer import SignConfig
from tests.support.toy_optimizer import build as build_sign

SIZE = ModernBertConfig(vocab_size=64, hidden_size=16, num_layers=4, num_heads=2, intermediate_size=24)
LR, MAX_LR, DECAY = 3e-3, 1e-2, 0.02
SHAPES = {(9, 4): 3, (8, 5): 2, (4, 7): 1, (6, 6): 1}  # of weights: how many matrices each is
RULES = [
    Rule(),
    Rule(momentum=0.8, nesterov=False, iterations=3, scale="original"),
    Rule(row_beta=0.9),
    Rule(row_beta=0.5, scale="original"),
    Rule(row_beta=0.9, cautious_decay=True),
]


def make_muon(params: list[nn.Parameter], rule: Rule, **more: Any) -> Muon:
    group = {"params": params, "parts": list(SHAPES.values())}
    return Muon([group], LR, rule=rule, **({"weight_decay": DECAY, "max_lr": MAX_LR} | more))


def reference(rule: Rule, steps: int) -> list[NDArray[np.float64]]:
    """Muon and NorMuon in numpy, each matrix of a weight on its own."""
    pieces = [p.detach().numpy() for p in make_params(SHAPES, torch.float64)]
    weights = [part for p, n in zip(pieces, SHAPES.values(), strict=True) for part in np.split(p, n)]
    momenta = [np.zeros_like(w) for w in weights]
    squares = [np.zeros((len(w), 1)) for w in weights]
    for t in range(1, steps + 1):
        whole = [g.double().numpy() for g in make_grads(SHAPES, t, 10.0)]
        grads = [part for g, n in zip(whole, SHAPES.values(), strict=True) for part in np.split(g, n)]
        for w, m, v, g in zip(weights, momenta, squares, grads, strict=True):
            m += (1 - rule.momentum) * (g - m)
            x = rule.momentum * m + (1 - rule.momentum) * g if rule.nesterov else m.copy()
            x /= np.sqrt((x * x).sum())
            for _ in range(rule.iterations):
                s = x @ x.T
                x = 3.4445 * x + (-4.7750 * s + 2.0315 * s @ s) @ x
            rows, columns = x.shape
            scale = 0.2 * max(rows, columns) ** 0.5 if rule.scale != "original" else max(1, rows / columns) ** 0.5
            if rule.row_beta is not None:
                v += (1 - rule.row_beta) * ((x * x).mean(axis=1, keepdims=True) - v)
                x = x / np.sqrt(v)
                x *= min(rows, columns) ** 0.5 / np.sqrt((x * x).sum())
            decayed = np.sign(w) == np.sign(x) if rule.cautious_decay else np.ones_like(w)
            w -= LR / MAX_LR * DECAY * decayed * w + LR * scale * x
    return weights


@pytest.mark.parametrize("rule", RULES)
def test_fp64_equals_the_equations_written_out(rule: Rule) -> None:
    params = make_params(SHAPES, torch.float64)
    optimizer = make_muon(params, rule)
    for t in range(1, 8):
        before = torch.cat([param.detach().flatten().clone() for param in params])
        step_with(optimizer, params, make_grads(SHAPES, t, 10.0))
    change = torch.cat([param.detach().flatten() for param in params]) - before
    assert optimizer.last_update_norm.item() == pytest.approx(change.norm().item(), rel=1e-6)
    grads = torch.cat([grad.flatten() for grad in make_grads(SHAPES, 7, 10.0)])
    assert optimizer.last_grad_norm.item() == pytest.approx(grads.norm().item(), rel=1e-6)
    found = [part for param, n in zip(params, SHAPES.values(), strict=True) for part in param.detach().chunk(n)]
    for part, expected in zip(found, reference(rule, 7), strict=True):
        np.testing.assert_allclose(part.numpy(), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("scale", SCALES)
def test_equals_torchs_muon(scale: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which computes in bf16 always; made to compute in fp64 it is the same but for rounding."""
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.double)
    to = Tensor.to  # called by torch's Muon from 2.15 on
    monkeypatch.setattr(
        Tensor, "to", lambda x, *a, **k: to(x, *a, **(k | {"dtype": torch.double} if "dtype" in k else k))
    )
    generator = torch.Generator().manual_seed(0)
    for shape in ((48, 32), (32, 48), (40, 40)):
        ours = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        theirs = nn.Parameter(ours.detach().clone())
        muon = Muon([{"params": [ours], "parts": [1]}], LR, rule=Rule(scale=scale), weight_decay=LR * 0.1)
        torchs = torch.optim.Muon([theirs], LR, weight_decay=0.1, adjust_lr_fn=scale)
        before = theirs.detach().clone()
        for _ in range(10):
            grad = torch.randn(shape, generator=generator)
            step_with(muon, [ours], [grad])
            step_with(torchs, [theirs], [grad])
        moved = (theirs - before).norm()
        assert (ours - theirs).norm() < 1e-10 * moved


def test_which_weights_are_matrices() -> None:
    found = {weight.name: weight for weight in weights_of(ModernBertForMaskedLM(SIZE))}
    assert [weight.name for weight in found.values() if weight.kind == "embedding"] == [
        "model.embeddings.tok_embeddings.weight"
    ]
    parts = {name.removeprefix("model.layers."): w.parts for name, w in found.items() if w.kind == "matrix"}
    own = {"attn.Wqkv.weight": 3, "attn.Wo.weight": 1, "mlp.Wi.weight": 2, "mlp.Wo.weight": 1}
    layers = {f"{layer}.{name}": number for layer in range(4) for name, number in own.items()}
    assert parts == layers | {"head.dense.weight": 1}
    assert {w.parameter.ndim for w in found.values() if w.kind == "vector"} == {1}


def test_all_else_moves_as_under_stable_adamw() -> None:
    """To the bit, at its own rate and decay, and both norms span all of it."""
    optim = MuonConfig(lr=1e-2, weight_decay=0.1, adam_lr_ratio=0.25, adam_decay_ratio=0.5)
    ours, plain = (ModernBertForMaskedLM(SIZE).double() for _ in range(2))
    plain.load_state_dict(ours.state_dict())
    run = make_run(optim)
    optimizer = build_optimizer(run.optim, ours)
    apply_clock(optimizer, Clock.of(run), 500)
    assert [(g["lr"], g["max_lr"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (1e-2, 1e-2, 0.1),
        (2.5e-3, 2.5e-3, 0.05),
        (2.5e-3, 2.5e-3, 0.0),
    ]
    weights = {w.name: w for w in weights_of(plain)}
    groups = [
        {"params": [w.parameter for w in weights.values() if w.kind == kind], "weight_decay": decay}
        for kind, decay in (("embedding", 0.05), ("vector", 0.0))
    ]
    adam = StableAdamW(groups, 2.5e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
            one.grad = torch.randn(one.shape, generator=generator, dtype=one.dtype)
            other.grad = one.grad.clone()
        optimizer.step()
        adam.step()
    for name, param in ours.named_parameters():
        assert torch.equal(param, weights[name].parameter) == (weights[name].kind != "matrix"), name


def make_run(optim: OptimConfig) -> RunConfig:
    phase = PhaseConfig(tokens=1000, row_tokens=16, batch_rows=4, microbatch_tokens=64)
    return RunConfig(name="x", model=SIZE, optim=optim, phases={"only": phase})


def test_nothing_moves_without_a_gradient_and_nan_is_seen() -> None:
    for rule in RULES:
        params = make_params(SHAPES, torch.float32)
        before = [param.detach().clone() for param in params]
        optimizer = make_muon(params, rule, weight_decay=0.0)
        step_with(optimizer, params, [torch.zeros_like(param) for param in params])
        assert all(torch.equal(param, old) for param, old in zip(params, before, strict=True))
        grads = make_grads(SHAPES, 1, 10.0)
        grads[0][0, 0] = math.nan
        step_with(optimizer, params, grads)
        assert optimizer.last_grad_norm.isnan() and params[0].isnan().any() and not params[1].isnan().any()


def test_a_step_never_waits_for_the_device() -> None:
    """Tensors without values refuse every attempt to read one."""
    for rule in RULES:
        params = [nn.Parameter(param.to("meta")) for param in make_params(SHAPES, torch.float32)]
        step_with(make_muon(params, rule), params, make_grads(SHAPES, 1, 10.0))


def test_owners_have_about_as_much_to_do() -> None:
    assert share_out((3, 9, 3, 3), 2) == (1, 0, 1, 1)
    assert share_out((1, 2), 4) == (1, 0)
    assert sorted(share_out((5,) * 8, 4)) == [0, 0, 1, 1, 2, 2, 3, 3]


# --- in shards ---------------------------------------------------------------------------------------------------

STEPS, HALF = 6, 3
State = tuple[dict[str, Tensor], dict[str, Tensor]]


class Layer(nn.Module):
    """Fused weights whose matrices end within a shard, and one of five rows, of which the last of 4 ranks has none."""

    stacked = {"fused": 2}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Linear(6, 14, bias=False)
        self.norm = nn.LayerNorm(14)
        self.out = nn.Linear(14, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.fused(x).tanh()))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(9, 6)
        self.layer = Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.table(x))


@dataclass
class Outcome:
    """Whole weights, both norms after each step, weights and state after step HALF, collectives of a step."""

    weights: dict[str, Tensor]
    norms: list[tuple[float, float]]
    half: State
    exchanges: int


def run(optim: OptimConfig, mesh_shape: tuple[int, ...] | None = None, start: State | None = None) -> Outcome:
    """Build like `train`, shard, swap parameters like Composer, continue from `start` or from the first step."""
    model, config = Net(), make_run(optim)
    optimizer = build_optimizer(config.optim, model)
    apply_clock(optimizer, Clock.of(config), 500)
    if mesh_shape is not None:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
        fully_shard(model.layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        sharded = dict(model.named_parameters())
        groups = [dict(group) for group in optimizer.param_groups]
        optimizer.param_groups.clear()
        for group in groups:
            optimizer.add_param_group(group | {"params": [sharded[name] for name in group["param_names"]]})
    if start is not None:
        load_weights(model, start[0])
        load_optimizer(model, optimizer, start[1])
    norms, half, exchanges = [], start, 0
    for step in range(0 if start is None else HALF, STEPS):
        if step == HALF and half is None:
            half = gather_weights(model, keep=True), gather_optimizer(model, optimizer, keep=True)
        generator = torch.Generator().manual_seed(step)
        model.zero_grad()
        inputs, weights = torch.randint(9, (8,), generator=generator), torch.randn(8, 5, generator=generator)
        (model(inputs) * weights).sum().backward()
        with patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange:
            optimizer.step()
        exchanges = exchange.call_count
        assert isinstance(optimizer, Muon)
        norms.append((optimizer.last_grad_norm.item(), optimizer.last_update_norm.item()))
    assert half is not None
    return Outcome(gather_weights(model, keep=True), norms, half, exchanges)


OPTIMS = {
    "muon": MuonConfig(lr=1e-2, weight_decay=0.02),
    "normuon": NorMuonConfig(lr=1e-2, weight_decay=0.02, row_beta=0.7),
}


def first_step(mesh_shape: tuple[int, ...] | None, name: str) -> dict[str, Tensor]:
    """Weights after one step on given gradients, which no reduction has rounded."""
    model = Net()
    config = make_run(OPTIMS[name])
    if mesh_shape is not None:
        fully_shard(model, mesh=init_device_mesh("cpu", mesh_shape))
    optimizer = build_optimizer(config.optim, model)
    apply_clock(optimizer, Clock.of(config), 500)
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        grad = torch.randn(param.shape, generator=generator)
        param.grad = like(grad, param)
    optimizer.step()
    return gather_weights(model, keep=True)


def on_ranks(
    shapes: list[tuple[int, ...]], start: dict[str, State] | None
) -> tuple[dict[str, dict[str, Tensor]], dict[tuple[str, Any], Outcome]]:
    found = {(name, shape): run(optim, shape) for name, optim in OPTIMS.items() for shape in shapes}
    if start is not None:
        found |= {(name, "resumed"): run(optim, shapes[0], start[name]) for name, optim in OPTIMS.items()}
    return {name: first_step(shapes[0], name) for name in OPTIMS}, found


def assert_same(found: Outcome, expected: Outcome) -> None:
    """Sums of the norms, and StableAdamW's, are rounded otherwise over other shards; directions of matrices are not."""
    assert found.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=2e-5, atol=2e-6)
    for norms, wanted in zip(found.norms[::-1], expected.norms[::-1], strict=False):
        assert norms == pytest.approx(wanted, rel=2e-5)


@pytest.mark.runs
@pytest.mark.timeout(290)
def test_shards_and_copies_of_shards_equal_one_process_and_its_checkpoints_resume_anywhere() -> None:
    """FSDP2 on 2 and 4 ranks and HSDP; a checkpoint of two ranks continues on one and on four; and from the same
    gradients matrices move by the same bits."""
    whole = {name: run(optim) for name, optim in OPTIMS.items()}
    firsts = {name: first_step(None, name) for name in OPTIMS}
    two = run_ranks(on_ranks, 2, [(2,)], None)
    halves = {name: two[0][1][name, (2,)].half for name in OPTIMS}
    four = run_ranks(on_ranks, 4, [(4,), (2, 2)], halves, timeout_seconds=250)
    for ranks in (two, four):
        for rank, (steps, outcomes) in enumerate(ranks):
            for name, moved in steps.items():
                for key in ("layer.fused.weight", "layer.out.weight"):
                    assert torch.equal(moved[key], firsts[name][key]), (name, key)
            for (name, shape), outcome in outcomes.items():
                assert_same(outcome, whole[name])
                assert outcome.exchanges == 2, (name, shape)
                for weight, first in zip(
                    outcome.weights.values(), ranks[0][1][name, shape].weights.values(), strict=True
                ):
                    assert torch.equal(weight, first), rank
    for name, optim in OPTIMS.items():
        assert_same(run(optim, start=halves[name]), whole[name])
        assert whole[name].exchanges == 0
        keys = {key.partition("/")[0] for key in halves[name][1] if key.endswith("fused.weight")}
        assert keys == {"momentum"} | ({"row_square"} if name == "normuon" else set())


# --- plan --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [SIZE, replace(SIZE, hidden_size=48, intermediate_size=16)])
def test_plan_counts_the_flops_of_a_step(size: ModernBertConfig) -> None:
    """As torch does: nothing but Newton-Schulz is a matrix product."""
    optim = MuonConfig(lr=1e-3, newton_schulz_iterations=3)
    model = ModernBertForMaskedLM(size)
    optimizer = build_optimizer(optim, model)
    with FlopCounterMode(display=False) as counter:
        step_with(optimizer, [*model.parameters()], [torch.ones_like(each) for each in model.parameters()])
    assert counter.get_total_flops() == optimizer_flops(census(size), optim) > 0
    assert optimizer_flops(census(size), StableAdamWConfig(lr=1e-3)) == 0


@pytest.mark.parametrize("optim", [*(kind(lr=1e-3) for kind in VARIANTS["optim"].values()), SignConfig(lr=1e-3)])
def test_every_optimizer_says_how_many_numbers_it_keeps(optim: OptimConfig) -> None:
    """`plan`, the automatic microbatch and the check of disk space go by it, a plugin's too."""
    size = replace(SIZE, vocab_size=512, hidden_size=128, intermediate_size=192)
    model = ModernBertForMaskedLM(size)
    own = build_sign(optim, weights_of(model)) if isinstance(optim, SignConfig) else build_optimizer(optim, model)
    step_with(own, [*model.parameters()], [torch.ones_like(each) for each in model.parameters()])
    counts, states = count_parameters(size), [*own.state.values()]
    kept = sum(value.numel() for state in states for name, value in state.items() if name != "step")
    assert kept == optim.state_numbers(counts.total, counts.hidden, counts.hidden_rows)
    assert moment_numbers(counts, optim) == kept


# --- refusals ----------------------------------------------------------------------------------------------------


def test_impossible_rules_and_parts_are_refused() -> None:
    for settings, message in (
        ({"momentum": -0.1}, r"momentum=-0\.1 \(Muon\)"),
        ({"row_beta": 1.0}, r"row_beta=1\.0 \(Muon\)"),
        ({"iterations": 0}, r"iterations=0 \(Muon\)"),
        ({"scale": "none"}, r"scale='none' \(Muon\): one of match_rms_adamw, original"),
    ):
        with pytest.raises(ValueError, match=message):
            Rule(**settings)  # type: ignore[arg-type]
    for shape, parts in (((7, 4), 2), ((8,), 2)):
        with pytest.raises(ValueError, match="is not 2 stacked matrices"):
            Muon([{"params": [nn.Parameter(torch.ones(shape))], "parts": [parts]}], LR)
    with pytest.raises(ValueError, match="master weights must be float32"):
        Muon([{"params": [nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))], "parts": [1]}], LR)
