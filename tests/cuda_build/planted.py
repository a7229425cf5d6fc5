"""A pytest plugin: plants the mistakes named in the variable PLANTED into the program, before any test runs."""

from __future__ import annotations

import os
from typing import Any


def pytest_configure(config: Any) -> None:
    for planted in filter(None, os.environ.get("PLANTED", "").split(" + ")):
        MISTAKES[planted]()


def pytest_collection_finish(session: Any) -> None:
    """Plant them into a program that a test starts."""
    if os.environ.get("PLANTED") == OTHER_NOISE:
        for module in {item.module for item in session.items}:
            module.PROGRAM = module.PROGRAM.replace("sys.exit", f"{_NOISE_OF_EACH_START}\nsys.exit")


def _wider_window() -> None:
    from modernbert_train.models.attention.visible import Visible

    around = Visible.around
    Visible.around = lambda half_window, *rest: around(half_window + 1, *rest)  # type: ignore[assignment]


def _half_the_dropout() -> None:
    from torch.nn import functional

    dropout = functional.dropout
    functional.dropout = lambda x, p=0.5, *rest, **named: dropout(x, p / 2, *rest, **named)


def _no_gradient_of_one_weight() -> None:
    """Only for a sharded model, like a lost hook."""
    from torch.distributed.tensor import DTensor

    from modernbert_train.optim.stable_adamw import StableAdamW

    step = StableAdamW.step

    def loses_one(self: Any, closure: Any = None) -> Any:
        first = self.param_groups[0]["params"][0]
        if isinstance(first, DTensor):
            first.grad = None
        return step(self, closure)

    StableAdamW.step = loses_one  # type: ignore[method-assign]


def _compiled_layers_are_off() -> None:
    from torch import nn

    compile_module = nn.Module.compile

    def off(self: Any, *given: Any, **named: Any) -> None:
        compile_module(self, *given, **named)
        call: Any = self._compiled_call_impl
        self._compiled_call_impl = lambda *given, **named: call(*given, **named) * 1.1

    nn.Module.compile = off  # type: ignore[method-assign]


def _compiled_for_each_call() -> None:
    """Make a number that changes from call to call part of the graph."""
    from modernbert_train.models.layers import EncoderLayer

    forward = EncoderLayer.forward

    def counted(self: Any, x_TD: Any, *given: Any, **named: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        return forward(self, x_TD * (self.calls / self.calls), *given, **named)

    EncoderLayer.forward = counted  # type: ignore[method-assign]


def _bf16_goes_on_with_the_first_weights() -> None:
    """Like a cache of cast weights that is never cleared."""
    import torch
    from torch.nn import functional

    linear = functional.linear

    def stale(x: Any, weight: Any, *rest: Any) -> Any:
        if torch.is_autocast_enabled(x.device.type):
            if not hasattr(weight, "first_weights"):
                weight.first_weights = weight.detach().clone()
            weight = weight.first_weights + (weight - weight.detach())
        return linear(x, weight, *rest)

    functional.linear = stale  # type: ignore[assignment]


def _muon_with_another_polynomial() -> None:
    from modernbert_train.optim import muon

    first, *rest = muon.COEFFICIENTS
    muon.COEFFICIENTS = (first * 1.1, *rest)  # type: ignore[assignment]


def _each_output_is_kept() -> None:
    from torch.nn.modules.module import register_module_forward_hook

    kept: list[Any] = []
    register_module_forward_hook(lambda module, given, out: kept.append(out))  # type: ignore[arg-type]


def _the_optimizer_reads_a_number() -> None:
    from modernbert_train.optim.stable_adamw import StableAdamW

    step = StableAdamW.step

    def reads(self: Any, closure: Any = None) -> Any:
        float(self.param_groups[0]["params"][0].grad.norm())
        return step(self, closure)

    StableAdamW.step = reads  # type: ignore[method-assign]


def _sdpa_stands_in() -> None:
    """Replace `varlen`, which needs a GPU: comparisons with the plain kernel can be tried with the plain one."""
    from modernbert_train.models.attention import sdpa, varlen

    varlen.support = sdpa.support  # type: ignore[assignment]
    varlen.prepare = sdpa.prepare  # type: ignore[assignment]
    varlen.attend = lambda *given: sdpa.attend(*given)  # type: ignore[assignment, misc]


def _across_boundaries() -> None:
    from dataclasses import replace

    from modernbert_train.models.attention import varlen

    prepare = varlen.prepare

    def joined(packed: Any, visible: Any) -> Any:
        boundaries_S = packed.cu_seqlens_S.clone()
        boundaries_S[2] = boundaries_S[3]
        return prepare(replace(packed, cu_seqlens_S=boundaries_S), visible)

    varlen.prepare = joined  # type: ignore[assignment]


def _no_gradient_of_v() -> None:
    from modernbert_train.models.attention import varlen

    attend = varlen.attend
    varlen.attend = lambda q, k, v, *rest: attend(q, k, v.detach(), *rest)  # type: ignore[assignment]


def _no_gloo() -> None:
    """In the program that a test starts, too."""
    os.environ["GLOO_SOCKET_IFNAME"] = "none0"


STAND_IN, NO_GLOO = "sdpa in the place of varlen", "gloo has no network"
OTHER_NOISE = "other noise after each start"
_NOISE_OF_EACH_START = """
import os
from modernbert_train.train import adapters
derive = adapters.derive
adapters.derive = lambda *key: derive(*key, os.getpid())
"""

MISTAKES = {
    "compiled layers are off": _compiled_layers_are_off,
    "compiled anew for each call": _compiled_for_each_call,
    "bf16 with the first weights": _bf16_goes_on_with_the_first_weights,
    "Muon with another polynomial": _muon_with_another_polynomial,
    "each output is kept": _each_output_is_kept,
    "the optimizer reads a number": _the_optimizer_reads_a_number,
    OTHER_NOISE: lambda: None,
    STAND_IN: _sdpa_stands_in,
    NO_GLOO: _no_gloo,
    "everything": lambda: None,
    "a kernel that sees across boundaries": _across_boundaries,
    "a kernel without a gradient of v": _no_gradient_of_v,
    "a window one token wider": _wider_window,
    "half the dropout": _half_the_dropout,
    "no gradient of one weight": _no_gradient_of_one_weight,
}
