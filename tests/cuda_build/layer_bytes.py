"""What a compiled layer of base reads and writes beside its matrix products and its attention, layer by layer; and what
stands outside the layers, the loss included, with its launches.

`python -m tests.cuda_build.layer_bytes DROPOUT ...`, on the null device, prints JSON; DROPOUT-bf16 has the residual in
bf16. A generated kernel counts each
tensor that it is given once, whole, and twice where it writes into it. Of one kernel that is too much: what turns q and
k reads two thirds of Wqkv's output. The microbatch is that of the recipe: on few tokens Inductor fuses less.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.utils._python_dispatch import _disable_current_modes

from benchmarks.batches import mean_loss
from modernbert_train.config.schema import ComputeConfig, MaskedLmConfig, ModernBertConfig
from modernbert_train.models.build import build_model
from modernbert_train.models.compiler import REGIONS
from tests.cuda_build.microbatch import Operations
from tests.gpu.parts import make_batch

ROW, ROWS = 1024, 95  # about 98,304 tokens, and a number that divides no weight: so what follows the tokens is told
TOKENS = ROW * ROWS
LAYERS = {"first": 0, "local": 1, "global": 3}
OF_BASE = {"first": 1, "local": 14, "global": 7}
OUTSIDE = (None, "outside")


class LayerTraffic:
    """Bytes by (layer, direction) and kernel; those of tensors that are as long as the microbatch, and the others."""

    def __init__(self) -> None:
        self.where: tuple[int | None, str] = OUTSIDE
        self.of_tokens: dict[tuple[int | None, str], Counter[str]] = {}
        self.others: Counter[tuple[int | None, str]] = Counter()
        self.launches: Counter[tuple[int | None, str]] = Counter()
        run = CachingAutotuner.run

        def counted(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            self.launches[self.where] += 1
            for argument, value in zip(tuner.fn.arg_names, args, strict=False):
                if isinstance(value, Tensor):
                    moved = (2 if argument.startswith("in_out") else 1) * value.numel() * value.element_size()
                    if value.numel() % TOKENS == 0:
                        self.of_tokens.setdefault(self.where, Counter())[tuner.fn.__name__] += moved
                    else:
                        self.others[self.where] += moved
            return run(tuner, *args, **kwargs)

        CachingAutotuner.run = counted

    def clear(self) -> None:
        self.of_tokens.clear()
        self.others.clear()
        self.launches.clear()

    def watch(self, layer: Any, index: int) -> None:
        """Know when a compiled layer is at work, in either direction."""
        call = layer._compiled_call_impl

        def enter(direction: str) -> None:
            self.where = (index, direction)

        def leave() -> None:
            self.where = OUTSIDE

        def watched(*given: Any) -> Any:
            enter("forward")
            found = call(*given)
            leave()
            node = found[0].grad_fn
            node.register_prehook(lambda grads: enter("backward"))
            node.register_hook(lambda inputs, outputs: leave())
            return found

        layer._compiled_call_impl = watched


class Outside(Operations):
    """The operations outside the layers that run one by one. Compiled functions are called without this mode, in which
    torch would run them uncompiled."""

    def __init__(self, traffic: LayerTraffic, model: Any) -> None:
        super().__init__()
        self._traffic = traffic
        for layer in model.model.layers:
            layer._compiled_call_impl = _without_modes(layer._compiled_call_impl)
        model._loss_and_gradient = _without_modes(model._loss_and_gradient)
        for module in (model, model.model):
            regions = vars(module)[REGIONS]
            regions.update({name: _without_modes(call) for name, call in regions.items()})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._traffic.where == OUTSIDE:
            return super().__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def _without_modes(call: Any) -> Any:
    def called(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return call(*args, **kwargs)

    return called


def look_at(dropout: float, residual: Any, traffic: LayerTraffic) -> dict[str, Any]:
    """Base's kinds of layers with one rate of dropout and one precision of the residual."""
    torch._dynamo.reset()
    config = ModernBertConfig(num_layers=4, attention_out_dropout=dropout)
    compute = ComputeConfig(attention="varlen", compile=True, residual_precision=residual)
    with torch.device("cuda"):
        model = build_model(config, MaskedLmConfig(), compute).train()
    model.compile_layers()
    for index, layer in enumerate(model.model.layers):
        traffic.watch(layer, index)
    batch = make_batch([1000] * 97, ROW, config.vocab_size, boundaries=128, rows=ROWS)

    def step() -> None:
        traffic.clear()
        with torch.autocast("cuda", torch.bfloat16):
            loss = mean_loss(model, batch)
        loss.backward()
        model.zero_grad()

    for _ in range(2):  # the first compiles
        step()
    with Outside(traffic, model) as operations:
        step()
    found: dict[str, Any] = {}
    for name, index in LAYERS.items():
        passes = {way: dict(sorted(traffic.of_tokens[index, way].items())) for way in ("forward", "backward")}
        by_kernel = {way: {kernel: round(b / TOKENS) for kernel, b in each.items()} for way, each in passes.items()}
        weights = sum(traffic.others[index, way] for way in passes)
        total = sum(sum(each.values()) for each in by_kernel.values())
        found[name] = by_kernel | {"bytes_per_token": total, "bytes_of_weights": weights}
    layers = sum(times * found[name]["bytes_per_token"] for name, times in OF_BASE.items())
    once = sum(traffic.of_tokens.get(OUTSIDE, Counter()).values()) + traffic.others[OUTSIDE]
    # of compiled kernels, and of operations one by one
    outside = {"compiled": [traffic.launches[OUTSIDE], round(once / TOKENS)]}
    outside |= {name: [operations.launches[name], round(b / TOKENS)] for name, b in sorted(operations.bytes.items())}
    return found | {"base_bytes_per_token": layers, "outside": outside}


if __name__ == "__main__":
    traffic = LayerTraffic()
    found = {}
    for word in sys.argv[1:]:
        rate, _, residual = word.partition("-")
        title = f"dropout {rate}, residual in {residual}" if residual else f"dropout {rate}"
        found[title] = look_at(float(rate), residual or "fp32", traffic)
    print(json.dumps(found))
