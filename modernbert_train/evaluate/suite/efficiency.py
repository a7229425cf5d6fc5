"""Measure the inference speed of encoders by length, as in ModernBERT's table 2 (arXiv 2412.13663): forward pass only.

    python -m modernbert_train.evaluate.suite.efficiency MODEL packed|padded FILE LENGTH... --tokens N --repeats N

Texts are random ids: `fixed` all have the length, `variable` are drawn around half of it (a normal distribution with a
standard deviation of an eighth, cut at the length). `packed` is this program's encoder, texts end to end without pads;
`padded` is transformers' AutoModel on the exported model, each batch padded to its longest text. Only tokens of texts
count. Each way is measured in a separate process, whose peak memory counts; lengths go from short to long.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modernbert_train.config.tools.suite import EfficiencyConfig
from modernbert_train.core.files import write_whole
from modernbert_train.core.read_json import read_json
from modernbert_train.core.text import file_name, markdown_table, markdown_text, plural
from modernbert_train.distributed.bf16 import takes_bf16
from modernbert_train.distributed.run_jobs import Job
from modernbert_train.evaluate.suite.cells import LOGS, Outcome, run_parts

KINDS, WAYS = ("fixed", "variable"), ("packed", "padded")
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


def measure(model: str, way: str, lengths: Sequence[int], tokens: int, repeats: int) -> tuple[list[Row], int]:
    """Tokens a second and memory, by length and kind, of lengths that the model reads; and the longest that it does."""
    import torch

    from modernbert_train.evaluate.loaded import load_model

    encoder = load_model(model)
    read = _packed(encoder) if way == "packed" else _padded(model)
    rows = []
    for length in sorted(lengths):
        if length > encoder.max_tokens:
            continue
        for kind in KINDS:
            texts = draw(length, kind, tokens, encoder.config.vocab_size)
            read(texts[:2])  # compiled, and memory taken
            speeds = []
            for _ in range(repeats):
                began = time.perf_counter()
                read(texts)
                speeds.append(sum(len(ids) + 2 for ids in texts) / (time.perf_counter() - began))
            on_gpu = torch.cuda.is_available()
            peak = (
                torch.cuda.max_memory_allocated()
                if on_gpu
                else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            )
            rows.append(
                {"length": length, "kind": kind, "tokens_per_second": statistics.median(speeds), "memory": peak}
            )
    return rows, encoder.max_tokens


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


def measure_all(
    models: Sequence[tuple[str, str]], config: EfficiencyConfig, out: Path, environment: dict[str, str]
) -> Outcome:
    """Measure each model that lacks a result file, one process at a time.

    Args:
        models: label and source of each.
        config: lengths and repeats.
        out: folder; files are in its `efficiency`.
        environment: of this process.

    Returns:
        The failures by model and way, and whether a signal came.
    """
    sizes = ["--tokens", str(config.tokens), "--repeats", str(config.repeats)]
    jobs = []
    for label, source in models:
        for way in WAYS:
            file = file_of(out, label, way, config)
            words = [sys.executable, "-m", __name__, source, way, str(file), *map(str, config.lengths), *sizes]
            if not file.exists():
                jobs.append(Job(f"{label}, {way}", words, out / LOGS / file_name(f"efficiency-{label}", f"-{way}.log")))
    return run_parts(jobs, environment, "measured")


def file_of(out: Path, label: str, way: str, config: EfficiencyConfig) -> Path:
    """Return the file of a measurement; each set of lengths has a separate file."""
    lengths = "-".join(map(str, sorted(config.lengths)))
    return out / "efficiency" / file_name(label, f"-{way}-{lengths}-{config.tokens}-{config.repeats}.json", 255)


def table_of(models: Sequence[str], out: Path, config: EfficiencyConfig) -> list[Row]:
    """Return a row for each model, length and kind that was measured."""
    rows: dict[tuple[str, int, str], Row] = {}
    for label in models:
        for way in WAYS:
            file = file_of(out, label, way, config)
            found = read_json(file) if file.exists() else {"rows": []}
            for each in found["rows"]:
                row = rows.setdefault((label, each["length"], each["kind"]), {"model": label, **each})
                row |= {f"{way}_tokens_per_second": each["tokens_per_second"], f"{way}_memory": each["memory"]}
                row[f"{way}_device"] = found["device"]
    return [
        {key: value for key, value in row.items() if key not in ("tokens_per_second", "memory")}
        for row in rows.values()
    ]


def not_measured(models: Sequence[str], out: Path, config: EfficiencyConfig) -> Iterator[str]:
    """Yield a note for each model that cannot read some length."""
    for label in models:
        files = [file for way in WAYS if (file := file_of(out, label, way, config)).exists()]
        max_tokens = read_json(files[0])["max_tokens"] if files else max(config.lengths)
        if longer := [f"{length:,}" for length in sorted(config.lengths) if length > max_tokens]:
            yield f"{label} reads {max_tokens:,} tokens at most: texts of {' and '.join(longer)} were not measured."


def as_markdown(rows: Sequence[Row]) -> str:
    """Tokens a second of both ways, their ratio, and memory in GB; and of which device."""
    head = ["model", "length", "texts", "packed, tokens/s", "padded, tokens/s", "ratio", "packed, GB", "padded, GB"]
    lines = []
    for row in rows:
        speeds = [row.get(f"{way}_tokens_per_second") for way in WAYS]
        ratio = f"{speeds[0] / speeds[1]:.2f}" if speeds[0] and speeds[1] else "-"
        shown = ["-" if speed is None else f"{speed:,.0f}" for speed in speeds]
        memory = [row.get(f"{way}_memory") for way in WAYS]
        sizes = ["-" if size is None else f"{size / 1e9:.2f}" for size in memory]
        lines.append([markdown_text(row["model"]), f"{row['length']:,}", row["kind"], *shown, ratio, *sizes])
    devices = sorted({row[key] for row in rows for way in WAYS if (key := f"{way}_device") in row})
    words = (
        "Forward passes alone: packed by this program, padded by transformers. Largest memory, up to this length. "
        f"Measured on {'; '.join(devices)}."
    )
    return f"{markdown_table(head, lines)}\n\n{words}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("file", type=Path)
    parser.add_argument("lengths", type=int, nargs="+")
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    options = parser.parse_args()
    rows, max_tokens = measure(options.model, options.way, options.lengths, options.tokens, options.repeats)
    options.file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(
        options.file, json.dumps({"rows": rows, "max_tokens": max_tokens, "device": _device()}, indent=2) + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
