"""One optimizer step: our StableAdamW, torch's fused AdamW and torch-optimi's StableAdamW.

The floor counts the bytes that any implementation must move: AdamW reads p, g, m, v and writes p, m, v (28 bytes a
parameter). StableAdamW cannot move p before the RMS of its whole tensor is known, and reads m and v again (36 bytes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from benchmarks.measure import Case, Group, Stage, Work
from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.optim.stable_adamw import StableAdamW

LR = 1e-4
SETTINGS: dict[str, Any] = {"betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 1e-5}


def optimizer_groups(models: dict[str, ModernBertConfig], device: torch.device) -> Iterator[Group]:
    """Yield a group for each model's weights."""
    for name, model in models.items():
        params = [nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in parameter_shapes(model)]
        grads = [torch.randn_like(param) for param in params]
        for param in params:
            param.grad = torch.empty_like(param)
        size = sum(param.numel() for param in params)
        cases = [
            Case("torch AdamW, fused", _steps(lambda ps: AdamW(ps, LR, fused=True, **SETTINGS), params, grads, 28)),
            Case("StableAdamW (ours)", _steps(lambda ps: StableAdamW(ps, LR, **SETTINGS), params, grads, 36)),
            Case("torch-optimi, foreach", _steps(_optimi(triton=False), params, grads, 36)),
        ]
        if device.type == "cuda":
            ours = Case("StableAdamW (ours, fused)", _steps(_fused, params, grads, 36))
            cases.insert(2, ours)
            cases.append(Case("torch-optimi, triton", _steps(_optimi(triton=True), params, grads, 36)))
        yield Group(f"optimizer, {name}, {size / 1e6:.1f} M weights", cases)


def _fused(params: list[nn.Parameter]) -> Optimizer:
    return StableAdamW(params, LR, fused=True, **SETTINGS)


def _optimi(triton: bool) -> Callable[[list[nn.Parameter]], Optimizer]:
    def build(params: list[nn.Parameter]) -> Optimizer:
        from optimi import StableAdamW  # type: ignore[import-untyped]  # optional: only this benchmark uses it

        optimizer: Optimizer = StableAdamW(
            params, lr=LR, decouple_lr=True, max_lr=LR, triton=triton, foreach=not triton, **SETTINGS
        )
        return optimizer

    return build


def _steps(
    make: Callable[[list[nn.Parameter]], Optimizer],
    params: list[nn.Parameter],
    grads: list[torch.Tensor],
    bytes_each: int,
) -> Callable[[], list[Stage]]:
    """Build an optimizer over the common parameters; its first step, in the warm-up, allocates the moments."""

    def build() -> list[Stage]:
        optimizer = make(params)

        def reset(_: object) -> None:
            for param, grad in zip(params, grads, strict=True):
                assert param.grad is not None
                param.grad.copy_(grad)  # torch-optimi modifies gradients

        size = sum(param.numel() for param in params)
        return [Stage("", reset), Stage("step", lambda _: optimizer.step(), Work(bytes=float(bytes_each * size)))]

    return build


def parameter_shapes(model: ModernBertConfig) -> list[tuple[int, ...]]:
    """Return the shapes of the encoder and its masked-LM head, the decoder tied to the embedding."""
    width, hidden = model.hidden_size, model.intermediate_size
    layer: list[tuple[int, ...]] = [(3 * width, width), (width, width), (2 * hidden, width), (width, hidden), (width,)]
    shapes: list[tuple[int, ...]] = [(model.vocab_size, width), (width,)]
    for index in range(model.num_layers):
        shapes += layer if index == 0 else [*layer, (width,)]  # the first layer lacks a norm before attention
    return [*shapes, (width,), (width, width), (width,), (model.vocab_size,)]
