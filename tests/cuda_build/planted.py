"""A plugin of pytest: plants the mistake that the variable PLANTED names into the program, before any test runs."""

from __future__ import annotations

import os
from typing import Any


def pytest_configure(config: Any) -> None:
    planted = os.environ.get("PLANTED", "")
    if planted:
        MISTAKES[planted]()


def _wider_window() -> None:
    from modernbert_train.config.schema import ModernBertConfig

    ModernBertConfig.half_window = property(lambda self: self.local_attention // 2 + 1)  # type: ignore[assignment]


def _half_the_dropout() -> None:
    from torch.nn import functional

    dropout = functional.dropout
    functional.dropout = lambda x, p=0.5, *rest, **named: dropout(x, p / 2, *rest, **named)


def _no_gradient_of_one_weight() -> None:
    """Of a sharded model alone, as a hook that is lost would."""
    from torch.distributed.tensor import DTensor

    from modernbert_train.optim.stable_adamw import StableAdamW

    step = StableAdamW.step

    def loses_one(self: Any, closure: Any = None) -> Any:
        first = self.param_groups[0]["params"][0]
        if isinstance(first, DTensor):
            first.grad = None
        return step(self, closure)

    StableAdamW.step = loses_one  # type: ignore[method-assign]


MISTAKES = {
    "a window one token wider": _wider_window,
    "half the dropout": _half_the_dropout,
    "no gradient of one weight": _no_gradient_of_one_weight,
}
