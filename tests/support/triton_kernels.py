"""Kernels of Triton without a GPU."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction


def interpret_kernels(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, interpret the kernels of a module and the functions of Triton that they call.

    TRITON_INTERPRET would have to be set before this process first imports Triton, which other tests do too.
    """
    if torch.cuda.is_available():
        return
    monkeypatch.setattr(JITFunction, "__call__", lambda self, *words, **named: _interpret(self)(*words, **named))
    for name, kernel in vars(module).copy().items():
        if isinstance(kernel, JITFunction):
            monkeypatch.setattr(module, name, _interpret(kernel))


def _interpret(kernel: JITFunction) -> InterpretedFunction:
    return InterpretedFunction(kernel.fn)
