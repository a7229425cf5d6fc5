"""From a configuration to an optimizer on the clock. If this breaks, weights decay that should not, or by old rates."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch import nn

from modernbert_train.clock import Clock
from modernbert_train.config.schema import (
    VARIANTS,
    AdamWConfig,
    OptimConfig,
    PhaseConfig,
    RunConfig,
    ScheduleConfig,
    StableAdamWConfig,
)
from modernbert_train.errors import ConfigError
from modernbert_train.optim.groups import decay_groups, weights_of
from modernbert_train.optim.optimizers import OPTIMIZERS, apply_clock, build_optimizer
from modernbert_train.optim.stable_adamw import StableAdamW
from modernbert_train.weights.gather import gather_optimizer, load_optimizer


class Encoder(nn.Module):
    """The kinds of parameters an encoder has: a tied embedding, a norm, matrices, biases and something frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.decoder = nn.Linear(4, 6)
        self.decoder.weight = self.embedding.weight
        self.bias = nn.Parameter(torch.zeros(2, 2))


def make_run(optim: OptimConfig) -> RunConfig:
    phase = PhaseConfig(tokens=1000, row_tokens=16, batch_rows=4, microbatch_tokens=64)
    return RunConfig(
        optim=optim,
        phases={
            "first": replace(phase, schedule=ScheduleConfig(warmup_tokens=100)),
            "second": replace(phase, lr_ratio=0.5, optim={"weight_decay": 0.25}),
            "third": replace(
                phase,
                lr_ratio=0.5,
                optim={"weight_decay": 0.0},
                schedule=ScheduleConfig(decay_tokens=1000, final_lr_ratio=0.01),
            ),
        },
    )


def test_an_empty_group_is_left_out() -> None:
    assert [group["param_names"] for group in decay_groups(weights_of(nn.Linear(2, 2, bias=False)), 0.01)] == [
        ["weight"]
    ]


def test_every_optimizer_of_the_schema_can_be_built() -> None:
    own = {kind for kind in VARIANTS["optim"].values() if kind.__module__.startswith("modernbert_train.")}
    assert set(OPTIMIZERS) >= own and len(own) >= 4  # a plugin of another test may have added a row


@pytest.mark.parametrize(
    ("optim", "kind"),
    [
        (StableAdamWConfig(lr=1e-3, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-5), StableAdamW),
        (AdamWConfig(lr=1e-3, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-5), torch.optim.AdamW),
    ],
)
def test_the_clock_sets_every_group(optim: OptimConfig, kind: type) -> None:
    """For each token count; in the release a restart kept the old max_lr, and decayed at 3/8 of what its YAML said."""
    config = make_run(optim)
    optimizer = build_optimizer(config.optim, Encoder())
    assert type(optimizer) is kind
    for group in optimizer.param_groups:
        assert tuple(group["betas"]) == (0.8, 0.95) and group["eps"] == 1e-5
    for tokens, rate, peak, decay in (
        (0, 1e-13, 1e-3, 0.1),
        (50, 5e-4, 1e-3, 0.1),
        (100, 1e-3, 1e-3, 0.1),
        (999, 1e-3, 1e-3, 0.1),
        (1000, 5e-4, 5e-4, 0.25),
        (1999, 5e-4, 5e-4, 0.25),
        (2000, 5e-4, 5e-4, 0.0),  # a phase's 0 is a choice, not an absence
        (2250, 5e-4 * (0.01 + 0.99 * 0.5), 5e-4, 0.0),
        (3000, 5e-6, 5e-4, 0.0),
        (9000, 5e-6, 5e-4, 0.0),
    ):
        state, optimizer = optimizer.state_dict(), build_optimizer(config.optim, Encoder())
        optimizer.load_state_dict(state)
        apply_clock(optimizer, Clock.of(config), tokens)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([rate, rate], rel=1e-8, abs=0)
        assert [group["weight_decay"] for group in optimizer.param_groups] == [decay, 0.0]
        if kind is StableAdamW:
            peaks = [group["max_lr"] for group in optimizer.param_groups]
            assert peaks == pytest.approx([peak, peak], rel=1e-12, abs=0)


def test_undecayed_weights_are_not_shrunk() -> None:
    """With zero gradients only the decay moves weights."""
    config = make_run(StableAdamWConfig(lr=1e-3, weight_decay=0.1))
    model = Encoder()
    optimizer = build_optimizer(config.optim, model)
    assert [group["param_names"] for group in optimizer.param_groups] == [
        ["embedding.weight", "linear.weight"],
        ["bias", "norm.weight", "norm.bias", "linear.bias", "decoder.bias"],
    ]
    apply_clock(optimizer, Clock.of(config), 500)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for name, param in model.named_parameters():
        factor = 0.9 if name in ("embedding.weight", "linear.weight") else 1.0
        torch.testing.assert_close(param.detach(), before[name] * factor)


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed")
def test_kernels_without_triton_are_refused_before_the_first_step() -> None:
    with pytest.raises(ConfigError, match=r"optim\.fused=true: Triton is not installed.*or set optim\.fused=false"):
        build_optimizer(make_run(StableAdamWConfig(lr=1e-3, fused=True)).optim, Encoder())


def test_adamw_fused_is_torchs_own_and_moves_weights_alike() -> None:
    """One key enables it; it works without Triton, and continues from the other form's moments."""
    weights = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = Encoder()
        optimizer = build_optimizer(make_run(AdamWConfig(lr=1e-2, fused=fused)).optim, model)
        assert optimizer.defaults["fused"] is (True if fused else None)
        for step in range(3):
            if step == 2:
                state = gather_optimizer(model, optimizer, keep=True)
                optimizer = build_optimizer(make_run(AdamWConfig(lr=1e-2, fused=not fused)).optim, model)
                load_optimizer(model, optimizer, state)
            for param in model.parameters():
                param.grad = torch.randn(param.shape)
            optimizer.step()
        weights.append([param.detach() for param in model.parameters()])
    torch.testing.assert_close(weights[1], weights[0])
