"""Fine-tuning beside transformers: tokens a second of steps on the same texts, model, classes and batches of 64 texts.

    python -m benchmarks.finetune --model runs/quickstart/hf --texts train.csv --label category

Ours is `finetune` itself: packed rows, the guard, the record, as metrics.jsonl has it. Theirs is the step of
transformers' Trainer without its bookkeeping: its classifier, padding to the longest text of each batch, torch's AdamW;
`accelerate`, which the Trainer needs, is not among this project's packages, so the loop stands here. Both run in turns
in one process, in fp32 on the CPU. Tokens are those that are not padding; the median step of each turn counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.finetune.examples import Split, read_splits
from modernbert_train.finetune.run import finetune

BATCH, SKIPPED = 64, 3  # texts; steps of each turn that are not counted


def ours(task: TaskConfig, model: Path, texts: int, steps: int) -> float:
    """Tokens a second of the median step of a fine-tuning."""
    with tempfile.TemporaryDirectory() as folder:
        keys = {key: getattr(task, key) for key in ("kind", "train", "validation", "text_columns", "label_column")}
        file = Path(folder) / "task.yaml"
        file.write_text(json.dumps(keys | {"epochs": steps * BATCH / texts}), encoding="utf-8")
        settings = [f"runs_folder={folder}", "name=ours", "compute.device=cpu", "logging.progress_bar=false"]
        finetune(str(file), str(model), [*settings, "checkpoint.interval_seconds=null"])
        lines = (Path(folder) / "ours/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps_of = [entry for entry in map(json.loads, lines) if entry["kind"] == "step"]
    return statistics.median(entry["tokens_per_second"] for entry in steps_of[SKIPPED:])


def theirs(task: TaskConfig, model: Path, split: Split, steps: int) -> float:
    """Tokens a second of the median step of transformers' classifier, padded."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    names = sorted({example.label for example in split.examples})
    reader = AutoTokenizer.from_pretrained(model)
    classifier = AutoModelForSequenceClassification.from_pretrained(model, num_labels=len(names)).train()
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=task.lr, betas=(0.9, 0.98), eps=1e-6)
    generator, rates = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        drawn = torch.randperm(len(split.examples), generator=generator)[:BATCH].tolist()
        examples = [split.examples[number] for number in drawn]
        columns = [list(column) for column in zip(*(example.texts for example in examples), strict=True)]
        inputs = reader(*columns, padding=True, truncation=True, max_length=task.max_tokens, return_tensors="pt")
        labels = torch.tensor([names.index(example.label) for example in examples])
        started = time.perf_counter()
        classifier(**inputs, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rates.append(int(inputs["attention_mask"].sum()) / (time.perf_counter() - started))
    return statistics.median(rates[SKIPPED:])


def main(words: Sequence[str] | None = None) -> None:
    """Run the turns, and print a line for each and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of an exported model")
    parser.add_argument("--texts", required=True, help="labelled texts, .tsv, .csv or .jsonl")
    parser.add_argument("--columns", nargs="+", default=["text"])
    parser.add_argument("--label", default="label")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(words)
    task = TaskConfig(
        kind="single-label",
        train=options.texts,
        validation={"dev": options.texts},
        text_columns=options.columns,
        label_column=options.label,
    )
    split, found = read_splits(task)["train"], []
    for number in range(options.rounds):
        mine = ours(task, options.model, len(split.examples), options.steps)
        their = theirs(task, options.model, split, options.steps)
        found.append(mine / their)
        print(f"round {number + 1}: ours {mine:,.0f}, theirs {their:,.0f} tokens/s: {mine / their:.2f}", flush=True)
    print(f"ratio, median of {options.rounds} rounds: {statistics.median(found):.2f}")


if __name__ == "__main__":
    main()
