"""Compiled layers and loss on the null device: python -m tests.cuda_build.layers ENCODER ...

Inductor generates them for the GPU and Triton compiles what it wrote, forward and backward; nothing of that runs. Three
batches with other documents go through, then a phase with other settings, then rows of another length. Prints JSON.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from benchmarks.batches import mean_loss
from modernbert_train.config.schema import (
    AlbertConfig,
    BertConfig,
    ComputeConfig,
    MaskedLmConfig,
    ModelConfig,
    ModernBertConfig,
)
from modernbert_train.models.build import build_model
from tests.cuda_build.null import Account, faults
from tests.gpu.parts import make_batch

TOKENS, ROW = 4096, 1024
# the kinds of layers of each are among its first ones, and of base's width
ENCODERS: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "modernbert": (ModernBertConfig(num_layers=4, attention_out_dropout=0.1), {"global_rope_theta": 160_000.0}),
    "bert": (BertConfig(num_layers=2, max_positions=2048), {}),
    "albert": (AlbertConfig(num_layers=2, max_positions=2048), {}),
}
DOCUMENTS = ([1000, 900, 700, 600], [1024] * 3, [100] * 35)


class Traffic:
    """What the generated kernels read and write, each tensor of each once: bytes for a token."""

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        run = CachingAutotuner.run

        def counted(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            name = tuner.fn.__name__
            self.launches[name] += 1
            for argument, value in zip(tuner.fn.arg_names, args, strict=False):
                if isinstance(value, Tensor):
                    both_ways = 2 if argument.startswith("in_out") else 1
                    self.bytes[name] += both_ways * value.numel() * value.element_size()
            return run(tuner, *args, **kwargs)

        CachingAutotuner.run = counted


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def look_at(name: str, traffic: Traffic) -> dict[str, Any]:
    """One encoder."""
    config, phase = ENCODERS[name]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.device("cuda"):
        model = build_model(config, MaskedLmConfig(), ComputeConfig(attention="varlen", compile=True)).train()
    model.compile_layers()
    rows = TOKENS // ROW
    batches = [
        make_batch(lengths, ROW, config.vocab_size, boundaries=64, rows=rows, seed=seed)
        for seed, lengths in enumerate(DOCUMENTS)
    ]
    seen = []

    def step(batch: Any) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = mean_loss(model, batch)
        loss.backward()
        model.zero_grad()
        seen.append(graphs())

    step(batches[0])
    for batch in batches[1:]:
        step(batch)
    if phase:
        model.model.set_phase(replace(config, **phase))
    traffic.launches.clear()
    traffic.bytes.clear()
    account = Account()
    account.reset()
    step(batches[0])
    found = account.read()
    per_token = {kernel: round(moved / TOKENS) for kernel, moved in sorted(traffic.bytes.items())}
    return {
        "graphs": seen[0],
        "graphs_after_other_documents_and_phase": seen[-1],
        "graph_breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
        "kernels": dict(sorted(traffic.launches.items())),
        "bytes_per_token": per_token,
        "triton_launches": sum(times for each, (times, _) in found.items() if each.startswith("triton")),
        "waits": sum(times for each, (times, _) in found.items() if each.startswith("wait")),
        "faults": faults(found),
    }


if __name__ == "__main__":
    traffic = Traffic()
    print(json.dumps({name: look_at(name, traffic) for name in sys.argv[1:]}))
