"""The sign of a gradient with momentum: a minimal optimizer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from modernbert_train.config.knob import knob
from modernbert_train.config.schema import OptimConfig
from modernbert_train.optim.groups import Weight, decay_groups


@dataclass(frozen=True, kw_only=True)
class SignConfig(OptimConfig):
    name: str = "sign"
    momentum: float = knob(0.9, low=0, below=1)

    def state_numbers(self, total: int, hidden: int, hidden_rows: int) -> int:
        return total


class Sign(Optimizer):
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                moment = state.setdefault("exp_avg", torch.zeros_like(parameter))
                moment.lerp_(parameter.grad, 1 - group["momentum"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(moment.sign(), alpha=group["lr"])


def build(config: SignConfig, weights: Sequence[Weight]) -> Optimizer:
    defaults: dict[str, Any] = {"lr": config.lr, "momentum": config.momentum}
    return Sign(decay_groups(weights, config.weight_decay), defaults)
