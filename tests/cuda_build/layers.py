"""Compiled layers and loss on the null device: python -m tests.cuda_build.layers CASE ..., see `CASES`.

Inductor generates them for the GPU and Triton compiles the generated code, forward and backward; kernels do not run.
Three batches with other documents are processed, then a phase with other settings, then rows of another length. Prints
JSON.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from modernbert_train.batch import Batch, weighted
from modernbert_train.config.schema import (
    AlbertConfig,
    BertConfig,
    ComputeConfig,
    DebertaConfig,
    MaskedLmConfig,
    ModelConfig,
    ModernBertConfig,
    ObjectiveConfig,
    ReplacedTokensConfig,
    XLNetConfig,
)
from modernbert_train.models import replaced
from modernbert_train.models.attention import choose_kernel, sdpa, with_backend
from modernbert_train.models.build import build_model
from tests.cuda_build import flash
from tests.cuda_build.null import Account, faults
from tests.support.gpu_parts import make_batch

TOKENS, ROW = 4096, 1024


@dataclass(frozen=True)
class Case:
    """A model to compile; its first layers cover all kinds, and have base's width.

    Attributes:
        model: the encoder.
        phase: overrides of another phase.
        objective: the heads.
        attention: the kernel; for FlashAttention with its version.
    """

    model: ModelConfig
    phase: dict[str, Any] = field(default_factory=dict)
    objective: ObjectiveConfig = field(default_factory=MaskedLmConfig)
    attention: str = "varlen"


MODERNBERT = ModernBertConfig(num_layers=4, attention_out_dropout=0.1)
LONG = {"global_rope_theta": 160_000.0}
CASES = {
    "modernbert": Case(MODERNBERT, LONG),
    "bert": Case(BertConfig(num_layers=2, max_positions=2048)),
    "albert": Case(AlbertConfig(num_layers=2, max_positions=2048)),
    "modernbert-flash2": Case(MODERNBERT, LONG, attention="flash2"),
    "modernbert-flash3": Case(MODERNBERT, LONG, attention="flash3"),
    "modernbert-flash4": Case(MODERNBERT, LONG, attention="flash4"),  # by flash4.py, with the package itself
    "modernbert-tiles": Case(MODERNBERT, LONG, attention="tiles"),
    "modernbert-flex": Case(MODERNBERT, LONG, attention="flex"),
    "deberta-flex": Case(DebertaConfig(num_layers=2, max_positions=2048), attention="flex"),
    "modernbert-rtd": Case(MODERNBERT, LONG, ReplacedTokensConfig()),
    "xlnet": Case(XLNetConfig(num_layers=2), attention="sdpa"),  # no other kernel takes its bias
}
DOCUMENTS = ([1000, 900, 700, 600], [1024] * 3, [100] * 35)


class Traffic:
    """Bytes that generated kernels read and write per token, each of its tensors once."""

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


def on_device(config: ModelConfig, objective: ObjectiveConfig, compute: ComputeConfig) -> Any:
    """Return a model in training mode, with compiled layers if the settings ask for them."""
    with torch.device("cuda"):
        model = build_model(config, objective, compute).train()
    if compute.compile:
        model.compile_layers()
    return model


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def batch_of(case: Case, seed: int) -> Batch:
    """Build a microbatch of some of the documents; the extra inputs of replaced-token detection are built by hand."""
    rows, vocab = TOKENS // ROW, case.model.vocab_size
    batch = make_batch(DOCUMENTS[seed], ROW, vocab, boundaries=64 * (1 + seed), rows=rows, seed=seed)
    longest = max(*DOCUMENTS[seed], TOKENS - sum(DOCUMENTS[seed]))
    batch = replace(batch, packed=replace(batch.packed, longest=longest))
    if "rtd" not in case.objective.terms:
        return batch
    more = {
        replaced.DRAWS: torch.zeros_like(batch.targets["positions_M"]),
        replaced.TOKENS: torch.ones_like(batch.packed.input_ids_T),
    }
    counts = {**batch.counts, "rtd": batch.num_tokens}
    return replace(batch, targets={**batch.targets, **more}, counts=counts)


def look_at(name: str, traffic: Traffic) -> dict[str, Any]:
    """Run one case."""
    case = CASES[name]
    config, phase = case.model, case.phase
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    flash.WINDOWS.clear()
    compute = ComputeConfig(attention=case.attention.rstrip("234"), compile=True)  # type: ignore[arg-type]
    model = on_device(config, case.objective, compute)
    batches = [batch_of(case, seed) for seed in range(len(DOCUMENTS))]
    seen = []

    def step(number: int) -> None:
        batch, lengths = batches[number], [*DOCUMENTS[number], TOKENS - sum(DOCUMENTS[number])]
        # sdpa reads lengths from the device, which has no contents
        known = patch.object(sdpa, "prepare", lambda packed, visible: sdpa.Layout(lengths, visible))
        with known, torch.autocast("cuda", torch.bfloat16):
            loss = weighted(model(batch).losses, case.objective.terms, batch.counts)
        loss.backward()
        model.zero_grad()
        seen.append(graphs())

    for number in range(len(batches)):
        step(number)
    if phase:
        model.set_phase(replace(config, **phase))
    traffic.launches.clear()
    traffic.bytes.clear()
    account = Account()
    account.reset()
    step(0)
    found = account.read()
    gpu = torch.device("cuda")
    kernel = choose_kernel(compute.attention, gpu, torch.bfloat16, bias=config.score_bias)
    per_token = {kernel: round(moved / TOKENS) for kernel, moved in sorted(traffic.bytes.items())}
    return {
        "graphs": seen[0],
        "graphs_after_other_documents_and_phase": seen[-1],
        "graph_breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
        "kernels": dict(sorted(traffic.launches.items())),
        "bytes_per_token": per_token,
        "triton_launches": sum(times for each, (times, _) in found.items() if each.startswith("triton")),
        "waits": sum(times for each, (times, _) in found.items() if each.startswith("wait")),
        "windows_of_flash3": sorted(flash.WINDOWS),
        "kernel": with_backend(kernel, gpu, torch.bfloat16),
        "faults": faults(found),
    }


if __name__ == "__main__":
    traffic = Traffic()
    found = {}
    for name in sys.argv[1:]:
        with flash.installed(CASES[name].attention):
            found[name] = look_at(name, traffic)
    print(json.dumps(found))
