"""Measure the memory that a forward pass keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modernbert_train.config.schema import ComputeConfig, ModernBertConfig
from modernbert_train.models import attention

PLAIN, RECOMPUTED = ComputeConfig(), ComputeConfig(activation_checkpointing=True)
SMALL = ModernBertConfig(
    vocab_size=8192, hidden_size=192, num_layers=5, num_heads=3, intermediate_size=288, attention_out_dropout=0.0
)


def use_kernel(monkeypatch: pytest.MonkeyPatch, attend: Any) -> None:
    """GPU kernels do not run here; their memory does not depend on the values they compute."""
    kernel = SimpleNamespace(prepare=lambda batch, side: None, attend=attend)
    monkeypatch.setattr(attention, "choose_kernel", lambda *_, **__: kernel)


@contextmanager
def kept_bytes(model: nn.Module) -> Iterator[dict[int, int]]:
    """Collect the bytes of each storage that autograd saves in this context: no weights, but their bf16 copies."""
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept.setdefault(storage._cdata, tensor)
            found.setdefault(storage._cdata, storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield found


def autocast(bf16: bool) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=bf16)


def running_total(record: Any) -> list[int]:
    """Return the bytes allocated during a profile, over time."""
    total, out = 0, []
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            out.append(total)
    return out


class Attend(torch.autograd.Function):
    """Saves the same tensors as FlashAttention, and computes next to nothing."""

    @staticmethod
    def forward(ctx: Any, q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor) -> Tensor:
        out_TNH = q_TNH.clone()
        ctx.save_for_backward(q_TNH, k_TNH, v_TNH, out_TNH, torch.zeros(q_TNH.shape[1], q_TNH.shape[0]))
        return out_TNH

    @staticmethod
    def backward(ctx: Any, grad_TNH: Tensor) -> tuple[Tensor, ...]:
        return grad_TNH.clone(), grad_TNH.clone(), grad_TNH.clone()
