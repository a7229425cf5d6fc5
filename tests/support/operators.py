"""Operators that torch dispatches, seen one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Context that calls `see(operator, args, kwargs, result)` after each operator."""

    def __init__(self, see: Callable[[Any, Any, Any, Any], object]) -> None:
        super().__init__()
        self.see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.see(func, args, kwargs or {}, out)
        return out
