"""Fine-tuning against a plain loop of transformers: means over seeds on five public tasks.

    python -m benchmarks.finetune_means --model MODEL --data FOLDER --out finetuned

MODEL is a folder with transformers' weights, FOLDER has `glue` and `other_tasks` (Banking77, WNUT-17, QNLI, STS-B and
WNLI; QNLI's training texts are four fifths of its development set). Both sides have equal rates, schedules, epochs,
batches of about as many texts, and dropout; their order of texts, dropout masks and first classifiers differ. A task
fails if Welch's test finds a difference with p below 0.01. Finished runs are kept, so a command that was stopped
resumes.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from modernbert_train.core.files import write_whole

SIGNIFICANT = 0.01  # of five tasks one in twenty would be below it by chance
SHARED = {"epochs": 3, "batch_texts": 32, "max_tokens": 128, "lr": 5e-5, "weight_decay": 5e-7, "warmup": 0.1}
TASKS: dict[str, dict[str, Any]] = {
    "banking77": {
        "train": "other_tasks/banking77_train.csv",
        "dev": "other_tasks/banking77_test.csv",
        "label_column": "category",
    },
    "wnut17": {
        "kind": "tokens",
        "train": "other_tasks/wnut17_train.conll",
        "dev": "other_tasks/wnut17_dev.conll",
        "metrics": ["entity_f1"],
    },
    "qnli": {"train": "glue/QNLI/dev.tsv", "dev": None, "text_columns": ["question", "sentence"]},
    "stsb": {
        "kind": "regression",
        "train": "glue/STS-B-open/train.tsv",
        "dev": "glue/STS-B-open/dev.tsv",
        "text_columns": ["sentence1", "sentence2"],
        "label_column": "score",
    },
    "wnli": {
        "train": "glue/WNLI/train.tsv",
        "dev": "glue/WNLI/dev.tsv",
        "text_columns": ["sentence1", "sentence2"],
    },
}
METRICS = {"single-label": "accuracy", "regression": "pearson", "tokens": "entity_f1"}


def write_task(name: str, data: Path, out: Path) -> Path:
    """Write a task's YAML, and of QNLI the two parts of its texts; return the YAML."""
    task: dict[str, Any] = {"kind": "single-label", **SHARED, **TASKS[name]}
    train, dev = data / task["train"], task.pop("dev")
    if dev is None:
        head, *lines = train.read_text(encoding="utf-8").splitlines(keepends=True)
        splits = {"train": [line for n, line in enumerate(lines) if n % 5], "dev": lines[::5]}
        for part, own in splits.items():
            (out / f"{name}-{part}.tsv").write_text("".join([head, *own]), encoding="utf-8")
        train, dev = (out / f"{name}-{part}.tsv" for part in splits)
    task |= {"train": str(train), "validation": {"dev": str(data / dev)}}
    file = out / f"{name}.yaml"
    file.write_text(yaml.safe_dump(task))
    return file


def read(task: dict[str, Any], file: str) -> Iterator[tuple[list[str], Any]]:
    """Yield texts and label of each line, or words and tags of each sentence."""
    if task["kind"] == "tokens":
        lines = Path(file).read_text(encoding="utf-8").split("\n")
        for has_words, part in itertools.groupby(lines, key=lambda line: bool(line.strip())):
            pairs = [line.split("\t") for line in part if has_words]
            if pairs:
                yield [word for word, _ in pairs], [tag for _, tag in pairs]
        return
    columns, label = task.get("text_columns", ["text"]), task.get("label_column", "label")
    how: Any = {} if file.endswith(".csv") else {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    with open(file, encoding="utf-8", newline="") as table:
        for row in csv.DictReader(table, **how):
            yield [row[column] for column in columns], row[label]


def plain(task: dict[str, Any], model_folder: str, seed: int, device: str) -> float:
    """Fine-tune by a plain loop; return the metric."""
    import transformers

    train, dev = (list(read(task, file)) for file in (task["train"], task["validation"]["dev"]))
    kind, by_word = task["kind"], task["kind"] == "tokens"
    told = [tag for _, label in train for tag in (label if by_word else [label])]
    names = sorted(set(told))
    config = transformers.AutoConfig.from_pretrained(model_folder, num_labels=1 if kind == "regression" else len(names))
    if hasattr(config, "classifier_pooling"):
        config.classifier_pooling = "mean"
    config.attention_probs_dropout_prob = 0.0  # of older encoders; `finetune` draws none
    reader = transformers.AutoTokenizer.from_pretrained(model_folder)
    transformers.set_seed(seed)
    of = transformers.AutoModelForTokenClassification if by_word else transformers.AutoModelForSequenceClassification
    model = of.from_pretrained(model_folder, config=config).to(device).train()

    def encode(rows: Sequence[tuple[list[str], Any]]) -> Any:
        texts = [[" ".join(words) for words, _ in rows]] if by_word else zip(*[texts for texts, _ in rows], strict=True)
        return reader(
            *map(list, texts), padding=True, truncation=True, max_length=task["max_tokens"], return_tensors="pt"
        )

    def places(batch: Any, number: int, words: Sequence[str]) -> Iterator[tuple[int, int]]:
        """Yield each word's number and its first token; words that share a token with another are left out."""
        at, last = 0, None
        for word, text in enumerate(words):
            token = batch.char_to_token(number, at)
            if token is not None and token != last:
                last = token
                yield word, token
            at += len(text) + 1

    def labelled(rows: Sequence[tuple[list[str], Any]]) -> Any:
        batch = encode(rows)
        if kind == "regression":
            batch["labels"] = torch.tensor([float(label) for _, label in rows])
        elif by_word:
            labels = torch.full_like(batch["input_ids"], -100)
            for number, (words, tags) in enumerate(rows):
                for word, token in places(batch, number, words):
                    labels[number, token] = names.index(tags[word])
            batch["labels"] = labels
        else:
            batch["labels"] = torch.tensor([names.index(label) for _, label in rows])
        return batch.to(device)

    size = task["batch_texts"]
    steps = math.ceil(len(train) / size) * task["epochs"]
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) == decays], "weight_decay": decay}
        for decays, decay in ((True, task["weight_decay"] / task["lr"]), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=task["lr"], betas=(0.9, 0.98), eps=1e-6)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, round(task["warmup"] * steps), steps)
    draw = random.Random(seed)
    for _ in range(task["epochs"]):
        order = draw.sample(train, len(train))
        for first in range(0, len(order), size):
            model(**labelled(order[first : first + size])).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    model.eval()
    right, predicted = [], []
    with torch.no_grad():
        for first in range(0, len(dev), size):
            rows = dev[first : first + size]
            batch = encode(rows)
            logits = model(**batch.to(device)).logits.cpu()
            for number, (words, label) in enumerate(rows):
                if by_word:
                    kept = list(places(batch, number, words))
                    right.append([label[word] for word, _ in kept])
                    predicted.append([names[int(logits[number, token].argmax())] for _, token in kept])
                else:
                    right.append(float(label) if kind == "regression" else label)
                    predicted.append(
                        float(logits[number, 0]) if kind == "regression" else names[logits[number].argmax()]
                    )
    return metric(kind, predicted, right)


def metric(kind: str, predicted: list[Any], right: list[Any]) -> float:
    """Return accuracy, Pearson's correlation, or seqeval's F1."""
    if kind == "regression":
        return statistics.correlation(predicted, right)
    if kind == "tokens":
        from seqeval.metrics import f1_score

        return float(np.mean(f1_score(right, predicted)))
    return statistics.fmean(mine == theirs for mine, theirs in zip(predicted, right, strict=True))


def ours(file: Path, name: str, options: argparse.Namespace) -> list[float]:
    """Fine-tune by the verb with every seed; return the metric of each."""
    words = [sys.executable, "-m", "modernbert_train", "finetune", str(file), f"compute.device={options.device}"]
    words += ["compute.precision=fp32", "--model", options.model, "--out", str(options.out / "verb" / name), "--seeds"]
    subprocess.run([*words, *map(str, options.seeds)], check=True)
    (row,) = json.loads((options.out / "verb" / name / "table.json").read_text())["rows"]
    return [row["cells"][0]["seeds"][str(seed)] for seed in options.seeds]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    from scipy.stats import ttest_ind

    options.out.mkdir(parents=True, exist_ok=True)
    print(
        "| task | metric | `finetune` | plain loop | difference | p |\n| --- | --- | --- | --- | --- | --- |",
        flush=True,
    )
    failed = False
    for name in options.tasks:
        file = write_task(name, options.data, options.out)
        task = yaml.safe_load(file.read_text())
        theirs = []
        for seed in options.seeds:
            kept = options.out / f"plain-{name}-{seed}.json"
            if not kept.exists():
                write_whole(kept, json.dumps(plain(task, options.model, seed, options.device)))
            theirs.append(json.loads(kept.read_text()))
        mine = ours(file, name, options)
        p = float(ttest_ind(mine, theirs, equal_var=False).pvalue) if len({*mine, *theirs}) > 1 else 1.0
        failed |= p < SIGNIFICANT
        sides = [f"{100 * statistics.fmean(each):.2f} ± {100 * statistics.stdev(each):.2f}" for each in (mine, theirs)]
        difference = 100 * (statistics.fmean(mine) - statistics.fmean(theirs))
        print(f"| {name} | {METRICS[task['kind']]} | {' | '.join(sides)} | {difference:+.2f} | {p:.2f} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
