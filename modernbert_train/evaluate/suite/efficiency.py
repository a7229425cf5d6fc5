"""Measure the inference speed of encoders by length, as in ModernBERT's table 2 (arXiv 2412.13663): forward pass only.

    python -m modernbert_train.evaluate.suite.efficiency packed|padded --model MODEL lengths=[64] runs_folder=OUT name=X

Texts are random ids: `fixed` all have the length, `variable` are drawn around half of it (a normal distribution with a
standard deviation of an eighth, cut at the length). `packed` is this program's encoder, texts end to end without pads;
`padded` is transformers' AutoModel on the exported model, each batch padded to its longest text. Only tokens of texts
count. Each way is measured in a separate process, whose peak memory counts; lengths go from short to long.
"""

from __future__ import annotations

import itertools
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modernbert_train.config.load import load_typed
from modernbert_train.config.tools.suite import EfficiencyConfig
from modernbert_train.core.text import markdown_table, markdown_text, plural
from modernbert_train.distributed.bf16 import takes_bf16
from modernbert_train.errors import exit_code_of
from modernbert_train.evaluate.finetune.result import RESULT, write_figures
from modernbert_train.evaluate.finetune.task import named_model
from modernbert_train.evaluate.retrieval.bm25 import BM25
from modernbert_train.evaluate.suite.cells import Parts, parse_cell_command
from modernbert_train.evaluate.suite.plan import Plan

KINDS, WAYS = ("fixed", "variable"), ("packed", "padded")
SPEED, MEMORY = "tokens_per_second", "memory"
BATCH_TOKENS = 16_384
Texts = list[NDArray[np.int32]]
Row = dict[str, Any]


def draw(length: int, kind: str, tokens: int, entries: int) -> Texts:
    """Return texts of random ids with about this many tokens, two of them special; the same in every call."""
    generator = np.random.default_rng(length)
    number = max(2, round(tokens / (length if kind == "fixed" else length / 2)))
    sizes = np.full(number, float(length)) if kind == "fixed" else generator.normal(length / 2, length / 8, number)
    sizes = np.clip(sizes, 8, length).astype(int) - 2
    return [generator.integers(entries // 2, entries, size=size).astype(np.int32) for size in sizes]


def measure(model: str, way: str, config: EfficiencyConfig) -> tuple[dict[str, dict[str, float]], int]:
    """Return tokens per second and memory by kind and length, up to the model's longest length; and that length."""
    import torch

    from modernbert_train.evaluate.loaded import load_model

    encoder = load_model(model)
    read = _packed(encoder) if way == "packed" else _padded(model)
    figures = {}
    for length in sorted(config.lengths):
        if length > encoder.max_tokens:
            continue
        for kind in KINDS:
            texts = draw(length, kind, config.tokens, encoder.config.vocab_size)
            read(texts[:2])  # warm-up: compile, and allocate memory
            rates = []
            for _ in range(config.repeats):
                began = time.perf_counter()
                read(texts)
                rates.append(sum(len(ids) + 2 for ids in texts) / (time.perf_counter() - began))
            on_gpu = torch.cuda.is_available()
            peak = (
                torch.cuda.max_memory_allocated()
                if on_gpu
                else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            )
            figures[f"{length} {kind}"] = {SPEED: statistics.median(rates), MEMORY: peak}
    return figures, encoder.max_tokens


def _packed(encoder: Any) -> Callable[[Texts], object]:
    return lambda texts: encoder.embed_ids(texts, pooling="mean", batch_tokens=BATCH_TOKENS, precision="auto")


def _padded(model: str) -> Callable[[Texts], object]:
    """Return a forward pass by transformers: batches of neighbours padded to the longest, in `packed`'s precision."""
    import torch
    from transformers import AutoModel

    from modernbert_train.evaluate.retrieval.runs import exported_encoder

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with exported_encoder(model) as folder:
        theirs = AutoModel.from_pretrained(folder).to(device).eval()

    @torch.no_grad()
    def read(texts: Texts) -> object:
        last = None
        longest = max(len(ids) for ids in texts) + 2
        rows = max(1, BATCH_TOKENS // longest)
        for start in range(0, len(texts), rows):
            batch = texts[start : start + rows]
            width = max(len(ids) for ids in batch) + 2
            ids_BS = torch.full((len(batch), width), 5)
            mask_BS = torch.zeros(len(batch), width, dtype=torch.long)
            for row, ids in enumerate(batch):
                ids_BS[row, 1 : len(ids) + 1] = torch.from_numpy(ids)
                mask_BS[row, : len(ids) + 2] = 1
            autocast = torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
            with autocast:
                last = theirs(input_ids=ids_BS.to(device), attention_mask=mask_BS.to(device)).last_hidden_state
            last = last.mean(dim=1).float().cpu()
        return last

    return read


def _device() -> str:
    """Return the device and precision of a figure."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, {'bf16' if takes_bf16('auto', '', on_gpu=True) else 'fp32'}"
    return f"CPU, {plural(torch.get_num_threads(), 'thread')}, fp32"


def speeds(plan: Plan) -> Parts:
    """Return the measurements of a suite; a baseline is as fast as its model."""
    if (config := plan.suite.efficiency) is None:
        return {}
    words = [f"{key}={json.dumps(value)}" for key, value in asdict(config).items()]
    return {
        (plan.labels[model], way): plan.part(f"efficiency-{way}", model, way, model, words, __name__)
        for model, way in itertools.product(plan.models, WAYS)
        if model != BM25 and not named_model(model).baseline
    }


def table_of(plan: Plan) -> list[Row]:
    """Return a row for each model, length and kind that was measured."""
    rows: dict[tuple[str, str], Row] = {}
    for (label, way), cell in speeds(plan).items():
        if (result := plan.result(cell)) is None:
            continue
        for key, figures in result["figures"].items():
            length, _, kind = key.partition(" ")
            row = rows.setdefault((label, key), {"model": label, "length": int(length), "kind": kind})
            row |= {f"{way}_{name}": value for name, value in figures.items()}
            row[f"{way}_device"] = result["settings"]["device"]
    return list(rows.values())


def not_measured(plan: Plan) -> Iterator[str]:
    """Yield a note for each model that cannot read some length."""
    measured = {label: result for (label, _), cell in speeds(plan).items() if (result := plan.result(cell)) is not None}
    for label, result in measured.items():
        max_tokens = result["settings"]["max_tokens"]
        if longer := [f"{length:,}" for length in sorted(result["settings"]["lengths"]) if length > max_tokens]:
            yield f"{label} reads {max_tokens:,} tokens at most: texts of {' and '.join(longer)} were not measured."


def as_markdown(rows: Sequence[Row]) -> str:
    """Return a table: tokens per second of both ways, their ratio, memory in GB, and the device."""
    head = ["model", "length", "texts", "packed, tokens/s", "padded, tokens/s", "ratio", "packed, GB", "padded, GB"]
    lines = []
    for row in rows:
        packed, padded = (row.get(f"{way}_{SPEED}") for way in WAYS)
        ratio = f"{packed / padded:.2f}" if packed and padded else "-"
        shown = ["-" if speed is None else f"{speed:,.0f}" for speed in (packed, padded)]
        memory = [row.get(f"{way}_{MEMORY}") for way in WAYS]
        sizes = ["-" if size is None else f"{size / 1e9:.2f}" for size in memory]
        lines.append([markdown_text(row["model"]), f"{row['length']:,}", row["kind"], *shown, ratio, *sizes])
    devices = sorted({row[key] for row in rows for way in WAYS if (key := f"{way}_device") in row})
    words = (
        "Forward passes alone: packed by this program, padded by transformers. Largest memory, up to this length. "
        f"Measured on {'; '.join(devices)}."
    )
    return f"{markdown_table(head, lines)}\n\n{words}"


def main() -> None:
    way, model, words, out = parse_cell_command()
    config = load_typed(EfficiencyConfig, [], words)
    figures, max_tokens = measure(model, way, config)
    out.mkdir(parents=True, exist_ok=True)
    write_figures(
        out / RESULT,
        task=f"efficiency, {way}",
        source=model,
        seed=None,
        run=out.name,
        figures=figures,
        counts={},
        settings={**asdict(config), "metrics": [SPEED], "max_tokens": max_tokens, "device": _device()},
    )


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
