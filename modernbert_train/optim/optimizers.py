"""Build optimizers and set their rates. To add one: a dataclass in config/schema.py, a file here, a row in OPTIMIZERS.

Rates are not stored: before every step `apply_clock` writes the clock's values into the param groups, so a checkpoint
of another phase or configuration cannot bring an old rate or decay into this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from modernbert_train.clock import Clock
from modernbert_train.config.packages import missing_fused
from modernbert_train.config.plugins import Rows
from modernbert_train.config.schema import (
    AdamWConfig,
    MuonConfig,
    NorMuonConfig,
    OptimConfig,
    StableAdamWConfig,
)
from modernbert_train.errors import ConfigError
from modernbert_train.optim.groups import Weight, decay_groups, param_group, weights_of
from modernbert_train.optim.schedules import lr_at, max_lr_at, weight_decay_at
from modernbert_train.optim.stable_adamw import StableAdamW


def _build_stable_adamw(config: StableAdamWConfig, weights: Sequence[Weight]) -> Optimizer:
    groups = decay_groups(weights, config.weight_decay)
    return StableAdamW(groups, config.lr, betas=config.betas, eps=config.eps, fused=_fused(config))


def _build_adamw(config: AdamWConfig, weights: Sequence[Weight]) -> Optimizer:
    fused = True if _fused(config) else None  # None lets torch choose between single-tensor and foreach
    return AdamW(decay_groups(weights, config.weight_decay), config.lr, betas=config.betas, eps=config.eps, fused=fused)


def _build_muon(config: MuonConfig, weights: Sequence[Weight]) -> Optimizer:
    from modernbert_train.optim.muon import Muon, Rule

    of_kind = {kind: [w for w in weights if w.kind == kind] for kind in ("matrix", "embedding", "vector")}
    matrices, decay, ratio = of_kind["matrix"], config.weight_decay, config.adam_lr_ratio
    groups = [
        param_group(matrices, decay, parts=[weight.parts for weight in matrices]),
        param_group(of_kind["embedding"], decay, lr_ratio=ratio, decay_ratio=config.adam_decay_ratio),
        param_group(of_kind["vector"], decay, lr_ratio=ratio, decay_ratio=0.0),
    ]
    rule = Rule(
        momentum=config.momentum,
        nesterov=config.nesterov,
        iterations=config.newton_schulz_iterations,
        scale=config.scale,
        row_beta=config.row_beta,
        cautious_decay=config.cautious_decay,
    )
    groups = [group for group in groups if group["params"]]
    return Muon(groups, config.lr, rule=rule, betas=config.betas, eps=config.eps, fused=_fused(config))


def _fused(config: OptimConfig) -> bool:
    for message in missing_fused(config):
        raise ConfigError(message)
    return bool(config.fused)


# type of the configuration -> function that builds the optimizer
OPTIMIZERS: Rows[type[OptimConfig], Callable[[Any, Sequence[Weight]], Optimizer]] = Rows(
    "optimizer",
    {
        StableAdamWConfig: _build_stable_adamw,
        AdamWConfig: _build_adamw,
        MuonConfig: _build_muon,
        NorMuonConfig: _build_muon,
    },
)


def build_optimizer(config: OptimConfig, model: nn.Module) -> Optimizer:
    """Build the configured optimizer over the trainable parameters; `apply_clock` sets its rates for each batch.

    Norms and biases are not decayed (see optim/groups.py).

    Raises:
        ValueError: a hyperparameter is out of range, or the weights are not fp32.
        ConfigError: the fused form is configured and Triton is missing.
    """
    return OPTIMIZERS[type(config)](config, weights_of(model))


def apply_clock(optimizer: Optimizer, clock: Clock, tokens: int) -> None:
    """Set the rates of every param group for the batch that starts after `tokens` global tokens.

    Sets `lr` and `weight_decay`, each times the group's ratio, and `max_lr`, if the optimizer has it.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr_at(clock, tokens) * group["lr_ratio"]
        group["weight_decay"] = weight_decay_at(clock, tokens) * group["decay_ratio"]
        if "max_lr" in group:
            group["max_lr"] = max_lr_at(clock, tokens) * group["lr_ratio"]
