"""Every key of an optimizer has an effect. A disconnected one would silently train by its default."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modernbert_train.clock import Clock
from modernbert_train.config.schema import VARIANTS, PhaseConfig, RunConfig
from modernbert_train.optim.optimizers import apply_clock, build_optimizer

CHANGED: dict[str, Any] = {
    "lr": 2e-3,
    "betas": (0.7, 0.9),
    "eps": 0.1,
    "weight_decay": 0.3,
    "cautious_decay": True,
    "momentum": 0.5,
    "nesterov": False,
    "newton_schulz_iterations": 2,
    "scale": "original",
    "adam_lr_ratio": 0.5,
    "adam_decay_ratio": 0.5,
    "row_beta": 0.5,
}
ELSEWHERE = {"name", "fused", "max_grad_norm"}  # the choice of kernel; and clipping, which precedes the optimizer
KEYS = [
    (name, each.name)
    for name, kind in VARIANTS["optim"].items()
    for each in dataclasses.fields(kind)
    if each.name not in ELSEWHERE
]


class Model(nn.Module):
    """An embedding, a matrix that is wider than high, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.linear = nn.Linear(8, 4)


def trained(name: str, **settings: Any) -> Tensor:
    """All weights after three steps on gradients that are always the same."""
    config = VARIANTS["optim"][name](**({"lr": 1e-3, "weight_decay": 0.1} | settings))
    phase = PhaseConfig(tokens=1000, row_tokens=16, batch_rows=4, microbatch_tokens=64)
    run = RunConfig(optim=config, phases={"all": phase})
    model, draw = Model(), torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw)
    optimizer = build_optimizer(run.optim, model)
    apply_clock(optimizer, Clock.of(run), 0)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = 0.1 * torch.randn(parameter.shape, generator=draw)
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(("name", "key"), KEYS, ids=lambda word: word)
def test_each_key_changes_the_weights(name: str, key: str) -> None:
    """Of muon also those that its embeddings, norms and biases take from StableAdamW."""
    usual, other = trained(name), trained(name, **{key: CHANGED[key]})
    assert torch.equal(usual, trained(name)) and (usual - other).abs().max() > 1e-6
