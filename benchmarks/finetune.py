"""Fine-tuning beside transformers' Trainer: scores and tokens a second, same model, texts, batches, rates and clipping.

    python -m benchmarks.finetune --text 'texts/*.jsonl.zst' --tasks tasks --out runs/beside     # again to go on

Pretrains a small ModernBERT within minutes, and fine-tunes its export on the tasks of finetune_tasks.py with several
seeds. Ours is `finetune` itself: packed rows, the guard, the record. Theirs is transformers' Trainer with its own class
for the task, its own first weights of the classifier, and batches padded to the longest text. Both train in turns in
one process, in fp32 on the CPU, with AdamW, the same rates, decay, warm-up, epochs and clipping at 1.0.

Every turn is a line of OUT/turns.jsonl. The table has for each task the mean of its metric over seeds with the standard
error, and by how many standard errors of their difference the means are apart. Speed is that of the median step, tokens
that are not padding, from one step's end to the next; the ratio is the median over seeds of two turns that followed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.finetune_tasks import small_tasks
from benchmarks.judged import pretrained
from modernbert_train.config.load import load_run
from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.core.text import markdown_table
from modernbert_train.evaluate.finetune.examples import Split
from modernbert_train.evaluate.finetune.numbers import Labels, number_labels
from modernbert_train.evaluate.finetune.read import read_splits
from modernbert_train.evaluate.finetune.task import read_task
from modernbert_train.evaluate.metrics import METRICS, entity_figures
from modernbert_train.train.finetune import finetune
from modernbert_train.weights.export import export_run

SKIPPED = 3  # steps of each turn that are not counted
OURS = "finetune"
THEIRS = {"Trainer": "random", "Trainer, like lengths together": "group_by_length"}
SMALL: dict[str, Any] = {"hidden_size": 128, "num_heads": 2, "intermediate_size": 192}
IGNORED = -100


def ours(file: Path, task: TaskConfig, model: Path, seed: int) -> tuple[float, float]:
    """Tokens a second of the median step of a fine-tuning, and the metric at its end."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"runs_folder={folder}", "name=ours", f"seed={seed}", "compute.device=cpu"]
        finetune(str(file), str(model), [*settings, "checkpoint.interval_seconds=null", "logging.progress_bar=false"])
        lines = (Path(folder) / "ours/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        result = json.loads((Path(folder) / "ours/result.json").read_text(encoding="utf-8"))
    steps_of = [entry for entry in map(json.loads, lines) if entry["kind"] == "step"]
    rate = statistics.median(entry["tokens_per_second"] for entry in steps_of[SKIPPED:])
    return rate, result["figures"]["test"][task.measured[0]]


def theirs(task: TaskConfig, splits: dict[str, Split], model: Path, seed: int, sampling: str) -> tuple[float, float]:
    """The same of transformers' Trainer."""
    import transformers
    from transformers import Trainer, TrainerCallback, logging, set_seed

    logging.set_verbosity_error()
    labels = number_labels(task, splits)
    reader, read = _inputs(task, model)
    data = {name: read(split, labels.values[name]) for name, split in splits.items()}
    words = task.kind == "tokens"
    pad = (transformers.DataCollatorForTokenClassification if words else transformers.DataCollatorWithPadding)(reader)
    counts, ends = [], []

    def collated(examples: list[dict[str, Any]]) -> Any:
        batch = pad([{key: value for key, value in each.items() if key != "length"} for each in examples])
        counts.append(int(batch["attention_mask"].sum()))
        return batch

    class Ends(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    set_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=_classifier(task, labels, model),
            args=_arguments(task, folder, seed, sampling),
            train_dataset=data["train"],
            data_collator=collated,
            callbacks=[Ends()],
        )
        trainer.train()
        # a step's batch has the place of the step: batches are collated in their order
        rates = [tokens / (end - before) for tokens, before, end in zip(counts[1:], ends[:-1], ends[1:], strict=False)]
        # without labels: a class that training has not has no logit
        plain: Any = [{key: value for key, value in each.items() if key != "labels"} for each in data["test"]]
        logits = trainer.predict(plain).predictions
    assert isinstance(logits, np.ndarray)
    return statistics.median(rates[SKIPPED:]), measured(task, logits, labels, data["test"])


def _classifier(task: TaskConfig, labels: Labels, model: Path) -> Any:
    import transformers

    if task.kind == "tokens":
        kind: Any = transformers.AutoModelForTokenClassification
        own: dict[str, Any] = {}
    else:
        kind = transformers.AutoModelForSequenceClassification
        problem = "regression" if task.kind == "regression" else f"{task.kind.replace('-', '_')}_classification"
        own = {"problem_type": problem, "classifier_pooling": task.pooling}
    return kind.from_pretrained(model, num_labels=len(labels.names) or 1, dtype=torch.float32, **own)


def _arguments(task: TaskConfig, folder: str, seed: int, sampling: str) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=task.batch_texts,
        per_device_eval_batch_size=task.batch_texts,
        num_train_epochs=task.epochs,
        learning_rate=task.lr,
        weight_decay=task.weight_decay / task.lr,  # torch's is times the rate
        adam_beta1=0.9,
        adam_beta2=0.98,
        adam_epsilon=1e-6,
        max_grad_norm=task.max_grad_norm or 0.0,
        warmup_steps=task.warmup,  # below 1: a share
        lr_scheduler_type="linear",
        train_sampling_strategy=sampling,
        length_column_name="length",
        remove_unused_columns=False,
        seed=seed,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def _inputs(task: TaskConfig, model: Path) -> tuple[Any, Any]:
    """Their tokenizer, and what makes the inputs of a split with it."""
    from transformers import AutoTokenizer

    reader = AutoTokenizer.from_pretrained(model)

    def read(split: Split, values: Sequence[Any]) -> list[dict[str, Any]]:
        if task.kind == "tokens":
            columns = [[" ".join(example.texts) for example in split.examples]]
        else:
            columns = [list(column) for column in zip(*(example.texts for example in split.examples), strict=True)]
        words = task.kind == "tokens"
        told = reader(*columns, truncation=True, max_length=task.max_tokens, return_offsets_mapping=words)
        found = []
        for at, value in enumerate(values):
            each = {key: told[key][at] for key in ("input_ids", "attention_mask")}
            label: Any = {"regression": float, "single-label": int}.get(task.kind, lambda value: value)(
                value.reshape(-1)[0] if task.kind in ("regression", "single-label") else value
            )
            if task.kind == "multi-label":
                label = [float(each) for each in value[0]]
            elif words:
                label = at_first_tokens(split.examples[at].texts, value.tolist(), told["offset_mapping"][at])
            found.append({**each, "labels": label, "length": len(each["input_ids"])})
        return found

    return reader, read


def at_first_tokens(words: Sequence[str], tags: Sequence[int], offsets: Sequence[tuple[int, int]]) -> list[int]:
    """A tag at the first token of each word of a sentence written with spaces; all else is ignored."""
    starts = np.cumsum([0, *(len(word) + 1 for word in words)])
    found, told = [IGNORED] * len(offsets), set()
    for token, (first, end) in enumerate(offsets):
        if first == end:  # a special token
            continue
        word = int(np.searchsorted(starts, max(first, end - 1), side="right")) - 1
        if word not in told:
            told.add(word)
            found[token] = tags[word]
    return found


def measured(task: TaskConfig, logits: np.ndarray, labels: Labels, test: Sequence[dict[str, Any]]) -> float:
    """The task's metric."""
    name = task.measured[0]
    if task.kind == "tokens":
        names = [*labels.names, *labels.unseen.get("test", ())]
        told, true = [], []
        for row, each in zip(logits, test, strict=True):
            places = [at for at, label in enumerate(each["labels"]) if label != IGNORED]
            told.append([names[int(row[at, : len(labels.names)].argmax())] for at in places])
            true.append([names[each["labels"][at]] for at in places])
        return entity_figures(told, true)[name]
    values = torch.tensor([each["labels"] for each in test])
    found = torch.from_numpy(logits)
    if task.kind == "regression":
        return METRICS[task.kind][name](found.squeeze(1), values)
    if task.kind == "multi-label":
        return METRICS[task.kind][name]((found > 0).long(), values.long())
    return METRICS[task.kind][name](found.argmax(dim=1), values)


def table(turns: Sequence[dict[str, Any]]) -> str:
    """What the turns came to."""
    rows = []
    for name in dict.fromkeys(turn["task"] for turn in turns):
        own = [turn for turn in turns if turn["task"] == name]
        by = {who: {turn["seed"]: turn for turn in own if turn["who"] == who} for who in (OURS, *THEIRS)}
        mine, them = ([turn["score"] for turn in by[who].values()] for who in (OURS, "Trainer"))
        if min(len(mine), len(them)) < 2:
            continue
        errors = [statistics.stdev(each) / len(each) ** 0.5 for each in (mine, them)]
        apart = statistics.mean(mine) - statistics.mean(them)
        both = (errors[0] ** 2 + errors[1] ** 2) ** 0.5
        pairs = [(by[OURS][seed], by["Trainer"][seed]) for seed in by[OURS] if seed in by["Trainer"]]
        rates = [statistics.median(turn["rate"] for turn in by[who].values()) for who in (OURS, "Trainer")]
        rows.append(
            [
                f"{name}, {own[0]['metric']}",
                str(len(pairs)),
                *(
                    f"{statistics.mean(each):.4f} ± {error:.4f}"
                    for each, error in zip((mine, them), errors, strict=True)
                ),
                f"{apart / both:+.1f}" if both else "0",
                *(f"{rate:,.0f}" for rate in rates),
                f"{statistics.median(a['rate'] / b['rate'] for a, b in pairs):.1f}",
            ]
        )
    head = ["task, metric", "seeds", "`finetune`", "Trainer", "apart", "tokens/s", "of the Trainer", "faster by"]
    return markdown_table(head, rows)


def main(words: Sequence[str] | None = None) -> None:
    """Do the turns that are missing, and print a line for each and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="documents, a file or a pattern of .jsonl or .jsonl.zst")
    parser.add_argument("--tasks", type=Path, required=True, help="folder of labelled texts, see finetune_tasks.py")
    parser.add_argument("--out", type=Path, default=Path("runs/beside"), help="where everything stays")
    parser.add_argument("--tokens", type=int, default=600_000, help="of pretraining")
    parser.add_argument("--only", nargs="+", help="of the tasks")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--like-lengths", action="store_true", help="the Trainer with like lengths together too")
    options = parser.parse_args(words)
    model = options.out / "pretrained/hf"
    if not model.is_dir():
        run = pretrained(options.text, options.out, options.tokens, SMALL)
        export_run(load_run([run / "config.yaml"]))
    files = small_tasks(options.tasks, options.out / "tasks")
    record = options.out / "turns.jsonl"
    done = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    whom = {OURS: "", "Trainer": THEIRS["Trainer"], **(THEIRS if options.like_lengths else {})}
    for seed in options.seeds:
        for name, file in files.items():
            if options.only and name not in options.only:
                continue
            task, _ = read_task(str(file), [])
            splits = read_splits(task)
            for who, sampling in whom.items():
                if any((turn["task"], turn["who"], turn["seed"]) == (name, who, seed) for turn in done):
                    continue
                turn = ours(file, task, model, seed) if who == OURS else theirs(task, splits, model, seed, sampling)
                done.append(
                    {
                        "task": name,
                        "metric": task.measured[0],
                        "who": who,
                        "seed": seed,
                        "rate": turn[0],
                        "score": float(turn[1]),
                    }
                )
                with record.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(done[-1]) + "\n")
                print(f"{name}, seed {seed}, {who}: {turn[0]:,.0f} tokens/s, {turn[1]:.4f}", flush=True)
    print(table(done))


if __name__ == "__main__":
    main()
