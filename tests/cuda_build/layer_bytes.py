"""Memory traffic of a compiled layer of base without matrix products and attention, by layer; and of all operations
outside the layers, the loss included, with their launches.

`python -m tests.cuda_build.layer_bytes DROPOUT ...`, on the null device, prints JSON; DROPOUT-bf16 has the residual in
bf16, DROPOUT-tiles local layers by our own kernels, which are counted separately. A generated kernel counts each of its
tensors once, whole, and twice if it writes into it. For one kernel that is too much: the rotation of q and k reads two
thirds of Wqkv's output. The microbatch is the recipe's: with few tokens Inductor fuses less.
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
from triton.runtime.jit import JITFunction

from benchmarks.batches import mean_loss
from modernbert_train.config.schema import ComputeConfig, MaskedLmConfig, ModernBertConfig
from modernbert_train.models.attention import tile_kernels
from modernbert_train.models.compiler import REGIONS
from tests.cuda_build.layers import on_device
from tests.cuda_build.microbatch import Operations
from tests.support.gpu_parts import make_batch

ROW, ROWS = 1024, 95  # about 98,304 tokens; 95 divides no weight's size, which identifies dimensions of tokens
TOKENS = ROW * ROWS
LAYERS = {"first": 0, "local": 1, "global": 3}
OF_BASE = {"first": 1, "local": 14, "global": 7}
OUTSIDE = (None, "outside")


class LayerTraffic:
    """Bytes by (layer, direction) and kernel: of tensors as long as the microbatch, and of others."""

    def __init__(self) -> None:
        self.where: tuple[int | None, str] = OUTSIDE
        self.of_tokens: dict[tuple[int | None, str], Counter[str]] = {}
        self.others: Counter[tuple[int | None, str]] = Counter()
        self.launches: Counter[tuple[int | None, str]] = Counter()
        self.of_tiles: dict[tuple[int | None, str], Counter[str]] = {}
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
        started = JITFunction.run

        def counted_tiles(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            if kernel.fn.__module__ == tile_kernels.__name__:
                moved = sum(each.numel() * each.element_size() for each in args if isinstance(each, Tensor))
                self.of_tiles.setdefault(self.where, Counter())[kernel.fn.__name__] += moved
            return started(kernel, *args, **kwargs)

        JITFunction.run = counted_tiles

    def clear(self) -> None:
        self.of_tokens.clear()
        self.others.clear()
        self.launches.clear()
        self.of_tiles.clear()

    def watch(self, layer: Any, index: int) -> None:
        """Track when a compiled layer runs, in either direction."""
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
    """The eager operations outside the layers. Compiled functions are called without this mode, in which torch would
    run them eagerly."""

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


def look_at(dropout: float, residual: Any, attention: Any, traffic: LayerTraffic) -> dict[str, Any]:
    """Run base's kinds of layers with one dropout rate, one precision of the residual and one kernel."""
    torch._dynamo.reset()
    config = ModernBertConfig(num_layers=4, attention_out_dropout=dropout)
    compute = ComputeConfig(attention=attention, compile=True, residual_precision=residual)
    model = on_device(config, MaskedLmConfig(), compute)
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
        if tiles := sum((traffic.of_tiles.get((index, way), Counter()) for way in passes), Counter()):
            found[name]["attention"] = {kernel: round(b / TOKENS) for kernel, b in sorted(tiles.items())}
    layers = sum(times * found[name]["bytes_per_token"] for name, times in OF_BASE.items())
    once = sum(traffic.of_tokens.get(OUTSIDE, Counter()).values()) + traffic.others[OUTSIDE]
    # of compiled kernels, and of eager operations
    outside = {"compiled": [traffic.launches[OUTSIDE], round(once / TOKENS)]}
    outside |= {name: [operations.launches[name], round(b / TOKENS)] for name, b in sorted(operations.bytes.items())}
    return found | {"base_bytes_per_token": layers, "outside": outside}


if __name__ == "__main__":
    traffic = LayerTraffic()
    found = {}
    for word in sys.argv[1:]:
        rate, _, other = word.partition("-")
        residual, attention = ("fp32", other) if other == "tiles" else (other or "fp32", "varlen")
        title = f"dropout {rate}" + {"": "", "tiles": ", tiles"}.get(other, f", residual in {residual}")
        found[title] = look_at(float(rate), residual, attention, traffic)
    print(json.dumps(found))
