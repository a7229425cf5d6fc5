"""Optimizers and what drives them. A new one: a dataclass in config/schema.py, a file here, a row in OPTIMIZERS.

Nothing here remembers a rate: before every step `apply_clock` writes what the clock says into the param groups, so a
checkpoint of another phase, or of another configuration, cannot carry an old rate or decay into this one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from modernbert_train.config.packages import missing_fused
from modernbert_train.config.schema import OptimConfig, RunConfig
from modernbert_train.errors import ConfigError
from modernbert_train.optim.groups import decay_groups
from modernbert_train.optim.schedules import lr_at, max_lr_at, weight_decay_at
from modernbert_train.optim.stable_adamw import StableAdamW


def _build_stable_adamw(config: OptimConfig, groups: list[dict[str, Any]]) -> Optimizer:
    for message in missing_fused(config):
        raise ConfigError(message)
    fused = config.fused  # type: ignore[attr-defined]
    return StableAdamW(groups, config.lr, betas=config.betas, eps=config.eps, fused=fused)


def _build_adamw(config: OptimConfig, groups: list[dict[str, Any]]) -> Optimizer:
    return AdamW(groups, config.lr, betas=config.betas, eps=config.eps)


OPTIMIZERS: dict[str, Callable[[OptimConfig, list[dict[str, Any]]], Optimizer]] = {
    "stable_adamw": _build_stable_adamw,
    "adamw": _build_adamw,
}


def build_optimizer(config: RunConfig, model: nn.Module) -> Optimizer:
    """Build the optimizer named by the config over the trainable parameters, set for the first batch of the run.

    Norms and biases are not decayed (see `decay_groups`).

    Raises:
        ValueError: a hyperparameter is out of range, or the weights are not fp32.
        ConfigError: the fused form is asked for where Triton is missing.
    """
    optimizer = OPTIMIZERS[config.optim.name](config.optim, decay_groups(model, config.optim.weight_decay))
    apply_clock(optimizer, config, tokens=0)
    return optimizer


def apply_clock(optimizer: Optimizer, config: RunConfig, tokens: int) -> None:
    """Set every param group for the batch that starts when `tokens` global tokens were seen.

    Sets `lr`; `weight_decay`, which stays 0 in groups that do not decay; and `max_lr`, where the optimizer has it.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr_at(config, tokens)
        group["weight_decay"] = weight_decay_at(config, tokens) if group["decays"] else 0.0
        if "max_lr" in group:
            group["max_lr"] = max_lr_at(config, tokens)
