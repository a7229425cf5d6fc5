"""GPU work of a microbatch: python -m tests.cuda_build.microbatch

Base and large run on the null device, forward and backward, compiled and eager, with two numbers of tokens: parts that
grow with these are reported per token, constant parts (weights) separately. Compiled, the bytes of all tensors that
each generated kernel receives are counted; eager, those that each operation reads and writes. A view moves no data, and
a kernel that receives a view is assumed to read that part only. Prints JSON.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.batches import mean_loss
from modernbert_train.config.load import load_run
from modernbert_train.config.schema import ComputeConfig, MaskedLmConfig, ModelConfig
from tests.cuda_build.layers import Traffic, on_device
from tests.cuda_build.null import Account, faults
from tests.support.gpu_parts import make_batch
from tests.support.paths import ROOT

SIZES = ("base", "large")
ROW = 1024
TOKENS = (8 * ROW, 16 * ROW)
MASKED = MaskedLmConfig()
_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "modernbert_train.varlen", "aten._flash", "aten._efficient")


class Operations(TorchDispatchMode):
    """Bytes that eager operations read and write, without products and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = str(func)
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        made = [each for each in tree_leaves(found) if isinstance(each, Tensor)]
        storages = {each.untyped_storage().data_ptr() for each in given}
        view = made and all(each.untyped_storage().data_ptr() in storages for each in made) and "_." not in name
        if not view and made and not name.startswith(_PRODUCTS) and "empty" not in name:
            self.launches[name] += 1
            self.bytes[name] += sum(each.numel() * each.element_size() for each in [*given, *made])
        return found


def at_two_sizes(counts: list[Counter[str]]) -> dict[str, list[int]]:
    """Return name -> the part that grows with tokens, per token, and the constant part."""
    found = {}
    for name in sorted(set().union(*counts)):
        few, many = (count[name] for count in counts)
        slope = (many - few) / (TOKENS[1] - TOKENS[0])
        found[name] = [round(slope), round(few - slope * TOKENS[0])]
    return found


def look_at(model: Any, config: ModelConfig, counter: Traffic | Operations) -> dict[str, Any]:
    """Run a microbatch of each number of tokens.

    Returns:
        kernels: name -> launches, bytes for each token, constant bytes. products: number; FLOPs for each token.
        launches: of all kinds. kinds: of launches, by kind.
    """
    account = Account()
    seen: list[tuple[Counter[str], Counter[str], dict[str, tuple[int, int]]]] = []
    for tokens in (TOKENS[0], *TOKENS, TOKENS[1]):  # the first of each compiles
        rows = tokens // ROW
        batch = make_batch([ROW] * rows, ROW, config.vocab_size, boundaries=4 * rows, rows=rows)
        counter.launches.clear()
        counter.bytes.clear()
        account.reset()
        with torch.autocast("cuda", torch.bfloat16):
            loss = mean_loss(model, batch)
        loss.backward()
        model.zero_grad()
        found = account.read()
        assert not faults(found), faults(found)
        seen.append((Counter(counter.launches), Counter(counter.bytes), found))
    (_, few, _), (launches, many, found) = seen[1], seen[3]
    products = [(times, flops) for name, (times, flops) in found.items() if name.startswith("product")]
    kinds = {kind: sum(n for name, (n, _) in found.items() if name.startswith(kind)) for kind in ("kernel", "triton")}
    return {
        "kernels": {name: [launches[name], *each] for name, each in at_two_sizes([few, many]).items()},
        "products": [sum(times for times, _ in products), round(sum(flops for _, flops in products) / TOKENS[1])],
        "launches": kinds | {"product": sum(times for times, _ in products)},
    }


def main() -> None:
    traffic, found = Traffic(), {}
    for size in SIZES:
        config = load_run([ROOT / f"yamls/recipes/modernbert-{size}.yaml"]).model
        for form in ("compiled", "eager"):
            torch._dynamo.reset()
            compute = ComputeConfig(attention="varlen", compile=form == "compiled")
            model = on_device(config, MASKED, compute)
            if compute.compile:
                found[f"{size} {form}"] = look_at(model, config, traffic)
            else:
                with Operations() as operations:
                    found[f"{size} {form}"] = look_at(model, config, operations)
            del model
    print(json.dumps(found))


if __name__ == "__main__":
    main()
