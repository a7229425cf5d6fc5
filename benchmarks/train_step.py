"""Tokens a second of whole training steps, beside transformers' ModernBERT on the same documents in the same run.

    python -m benchmarks.train_step --preset cpu        # the quickstart's size, half a minute
    python -m benchmarks.train_step --preset cpu-base   # ModernBERT-base, some minutes
    python -m benchmarks.train_step --preset h200       # ModernBERT-base in bf16, compiled, on one GPU

Documents have log-normal lengths with a median of 300 tokens, cut at 1,024; 30 % of the tokens are predicted. We pack
them into rows of 1,024. transformers gets them as its users give them to it: padded to the longest of a batch, with
torch's scaled_dot_product_attention and its default loss over all positions, in batches of 8 documents, the Trainer's
default (4 in cpu-base, to fit into 16 GB of memory; 64 on a GPU). A third line uses its switch `sparse_prediction`,
which computes logits only where something is predicted. Both models start from the same weights, must agree on the
first loss, and take turns, round by round on new documents, so that a busy machine disturbs all alike. Only tokens of
documents count, never padding. Dropout is off.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW

from benchmarks.documents import PAD, ROW_TOKENS, Document, draw_rows, pack, training_flops
from modernbert_train.batch import IGNORED_LABEL
from modernbert_train.config.schema import ModelConfig
from modernbert_train.models.init import initialize
from modernbert_train.models.modernbert import ModernBertForMaskedLM
from modernbert_train.optim.stable_adamw import StableAdamW

DATASHEET_FLOPS = 989e12  # dense bf16 of an H100 or H200 SXM

SMALL = ModelConfig(
    vocab_size=8192, hidden_size=192, num_layers=7, num_heads=3, intermediate_size=288, attention_out_dropout=0.0
)
BASE = ModelConfig(attention_out_dropout=0.0)


@dataclass(frozen=True)
class Preset:
    """What one round computes: a step over `rows` packed rows, cut into microbatches of so many rows or documents."""

    model: ModelConfig
    rows: int
    microbatch_rows: int
    microbatch_documents: int
    rounds: int
    compile: bool = False


PRESETS = {
    "cpu": Preset(SMALL, rows=4, microbatch_rows=4, microbatch_documents=8, rounds=5),
    "cpu-base": Preset(BASE, rows=3, microbatch_rows=3, microbatch_documents=4, rounds=2),
    "h200": Preset(BASE, rows=384, microbatch_rows=96, microbatch_documents=64, rounds=10, compile=True),
}


@dataclass
class Contender:
    """A model with its optimizer, and what was measured: `step` trains on rows and gives its loss and the time of each
    part, once the tensors are on the device (a run's workers prepare them meanwhile)."""

    step: Callable[[list[list[Document]]], tuple[float, dict[str, float]]]
    rates: list[float] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes: int = 0


class Stopwatch:
    """Time between marks: CUDA events on a GPU, the wall clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []
        if self._on_gpu:
            torch.cuda.synchronize()
        self.mark("start")

    def mark(self, part: str) -> None:
        """End of a stretch that belongs to `part`."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((part, event))
        else:
            self._marks.append((part, time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """Sum of each part's stretches; waits for the GPU."""
        if self._on_gpu:
            torch.cuda.synchronize()
        total: dict[str, float] = {}
        for (_, begin), (part, end) in zip(self._marks, self._marks[1:], strict=False):
            if isinstance(begin, float) and isinstance(end, float):
                took = end - begin
            else:
                assert isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
                took = begin.elapsed_time(end) / 1e3
            total[part] = total.get(part, 0.0) + took
        return total


def autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def our_contender(model: ModernBertForMaskedLM, preset: Preset, device: torch.device) -> Contender:
    optimizer = StableAdamW(model.parameters(), 1e-4, betas=(0.9, 0.98), eps=1e-6, weight_decay=1e-5)

    def step(rows: list[list[Document]]) -> tuple[float, dict[str, float]]:
        size = preset.microbatch_rows
        batches = [pack(rows[first : first + size]).to(device) for first in range(0, len(rows), size)]
        total = sum(batch.num_predicted for batch in batches)
        losses = []
        watch = Stopwatch(device)
        for batch in batches:
            with autocast(device):
                loss = model(batch).loss * (batch.num_predicted / total)
            watch.mark("forward")
            loss.backward()
            watch.mark("backward")
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        watch.mark("optimizer")
        return float(sum(losses)), watch.seconds()

    return Contender(step)


def pad_together(documents: list[Document]) -> tuple[Tensor, ...]:
    """Ids, attention mask and labels, each [documents, longest], as transformers' collator pads them."""
    ids = pad_sequence([document.input_ids for document in documents], batch_first=True, padding_value=PAD)
    mask = pad_sequence([torch.ones_like(document.labels) for document in documents], batch_first=True)
    labels = pad_sequence([document.labels for document in documents], batch_first=True, padding_value=IGNORED_LABEL)
    return ids, mask, labels


def their_contenders(model: ModernBertForMaskedLM, preset: Preset, device: torch.device) -> dict[str, Contender]:
    """transformers' model with our weights, which serves both ways of predicting."""
    config = preset.model
    theta = {"rope_type": "default", "rope_theta": 10_000.0}
    hf_config = transformers.ModernBertConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        rope_parameters={"full_attention": theta, "sliding_attention": theta},
        pad_token_id=PAD,
        bos_token_id=PAD,
        eos_token_id=PAD,
        cls_token_id=PAD,
        sep_token_id=PAD,
        attn_implementation="sdpa",
    )
    twin = transformers.ModernBertForMaskedLM(hf_config)
    twin.load_state_dict(model.state_dict())
    twin.to(device).train()
    optimizer = AdamW(twin.parameters(), 1e-4, betas=(0.9, 0.98), eps=1e-6, fused=True)

    def step(rows: list[list[Document]], sparse: bool) -> tuple[float, dict[str, float]]:
        twin.sparse_prediction = sparse
        size, documents = preset.microbatch_documents, [document for row in rows for document in row]
        batches = [pad_together(documents[first : first + size]) for first in range(0, len(documents), size)]
        predicted = [int((labels != IGNORED_LABEL).sum()) for _, _, labels in batches]
        batches = [tuple(tensor.to(device) for tensor in batch) for batch in batches]
        losses = []
        watch = Stopwatch(device)
        for (ids, mask, labels), count in zip(batches, predicted, strict=True):
            with autocast(device):
                loss = twin(input_ids=ids, attention_mask=mask, labels=labels).loss * (count / sum(predicted))
            watch.mark("forward")
            loss.backward()
            watch.mark("backward")
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        watch.mark("optimizer")
        return float(sum(losses)), watch.seconds()

    return {
        "transformers, padded": Contender(partial(step, sparse=False)),
        "transformers, padded, sparse": Contender(partial(step, sparse=True)),
    }


def run(preset: Preset, device: torch.device) -> tuple[dict[str, Contender], list[float]]:
    """Take the rounds.

    Returns:
        The contenders with their measurements, ours first, and the FLOPs that each round's documents need.

    Raises:
        RuntimeError: the contenders do not compute the same loss from the same weights.
    """
    model = ModernBertForMaskedLM(preset.model)
    initialize(model, preset.model, seed=17)
    model.to(device).train()
    contenders = {
        "ours": our_contender(model, preset, device),
        **their_contenders(model, preset, device),
    }
    if preset.compile:
        model.compile_layers()
    rng = np.random.default_rng(0)
    flops = []
    for index in range(-1, preset.rounds):  # round -1 compiles, allocates the moments, and compares the losses
        num_rows = 1 if index < 0 and not preset.compile else preset.rows
        rows = draw_rows(rng, num_rows, preset.model.vocab_size)
        lengths = [len(document) for row in rows for document in row]
        predicted = sum(document.num_predicted for row in rows for document in row)
        losses = []
        for contender in contenders.values():
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            loss, seconds = contender.step(rows)
            losses.append(loss)
            if index < 0:
                continue
            contender.rates.append(sum(lengths) / sum(seconds.values()))
            for part, took in seconds.items():
                contender.seconds.setdefault(part, []).append(took)
            if device.type == "cuda":
                contender.peak_bytes = max(contender.peak_bytes, torch.cuda.max_memory_allocated())
        if index < 0 and abs(losses[0] - losses[1]) > (5e-3 if device.type == "cuda" else 1e-4) * losses[0]:
            raise RuntimeError(f"the first losses, {losses[:2]}, differ: the contenders do not compute the same.")
        if index >= 0:
            flops.append(training_flops(preset.model, lengths, predicted))
    return contenders, flops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device, preset = torch.device(arguments.device), PRESETS[arguments.preset]
    torch.manual_seed(0)
    contenders, flops = run(preset, device)

    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    print(f"{where}, {torch.get_num_threads()} threads, torch {torch.__version__}, {preset.rounds} rounds")
    print(f"{preset.rows} rows of {ROW_TOKENS:,} tokens a step, width {preset.model.hidden_size}")
    parts = list(contenders["ours"].seconds)
    print(f"\n{'':<30}{'tokens/s':>10}{'min':>10}{'max':>10}{'ours is':>9}  " + "".join(f"{p:>12}" for p in parts))
    first = contenders["ours"].rates
    for name, contender in contenders.items():
        ratio = median(ours / theirs for ours, theirs in zip(first, contender.rates, strict=True))
        line = (
            f"{name:<30}{median(contender.rates):>10,.0f}{min(contender.rates):>10,.0f}{max(contender.rates):>10,.0f}"
        )
        print(line + f"{ratio:>8.2f}x  " + "".join(f"{median(contender.seconds[p]):>10.3f} s" for p in parts))
    for name, contender in contenders.items() if device.type == "cuda" else ():
        took = [sum(parts) for parts in zip(*contender.seconds.values(), strict=True)]
        mfu = median(work / seconds for work, seconds in zip(flops, took, strict=True)) / DATASHEET_FLOPS
        peak = f"peak {contender.peak_bytes / 1e9:.1f} GB, both models' weights included"
        print(f"{name}: {mfu:.1%} of {DATASHEET_FLOPS / 1e12:.0f} TFLOP/s, {peak}")


if __name__ == "__main__":
    main()
