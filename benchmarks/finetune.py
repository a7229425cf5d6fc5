"""Fine-tuning beside transformers' Trainer: tokens a second and scores, same model, texts, classes, batches and rates.

    python -m benchmarks.finetune --model runs/quickstart/hf --texts train.csv --test test.csv --label category

Ours is `finetune` itself: packed rows, the guard, the record. Theirs is transformers' Trainer with its classifier, once
padding to the longest text of a random batch, as it does by itself, and once with texts of like length in a batch
(`train_sampling_strategy="group_by_length"`), which saves most of the padding and makes other batches. All are run to
the end in turns in one process, in fp32 on the CPU; the same optimizer, rates, decay, warm-up and clipping. Tokens are
those that are not padding; from one step's end to the next, the median. Scores are accuracies on --test, over seeds.
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

from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.finetune.examples import Split, read_splits
from modernbert_train.finetune.run import finetune
from modernbert_train.text import markdown_table

SKIPPED = 3  # steps of each turn that are not counted
OURS = "finetune"
THEIRS = {"Trainer": "random", "Trainer, like lengths together": "group_by_length"}


def ours(task: TaskConfig, model: Path, seed: int) -> tuple[float, float]:
    """Tokens a second of the median step of a fine-tuning, and the accuracy at its end."""
    with tempfile.TemporaryDirectory() as folder:
        own = ("kind", "train", "validation", "text_columns", "label_column", "lr", "epochs", "batch_texts")
        file = Path(folder) / "task.yaml"
        file.write_text(json.dumps({key: getattr(task, key) for key in own}), encoding="utf-8")
        settings = [f"runs_folder={folder}", "name=ours", f"seed={seed}", "compute.device=cpu"]
        finetune(str(file), str(model), [*settings, "checkpoint.interval_seconds=null", "logging.progress_bar=false"])
        lines = (Path(folder) / "ours/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        result = json.loads((Path(folder) / "ours/result.json").read_text(encoding="utf-8"))
    steps_of = [entry for entry in map(json.loads, lines) if entry["kind"] == "step"]
    rate = statistics.median(entry["tokens_per_second"] for entry in steps_of[SKIPPED:])
    return rate, result["figures"]["test"]["accuracy"]


def theirs(task: TaskConfig, model: Path, splits: dict[str, Split], seed: int, sampling: str) -> tuple[float, float]:
    """The same of transformers' Trainer."""
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        logging,
        set_seed,
    )

    logging.set_verbosity_error()
    names = sorted({str(example.label) for example in splits["train"].examples})
    reader = AutoTokenizer.from_pretrained(model)

    def read(split: Split) -> list[dict[str, Any]]:
        columns = [list(column) for column in zip(*(example.texts for example in split.examples), strict=True)]
        told = reader(*columns, truncation=True, max_length=task.max_tokens)
        labels = [names.index(str(example.label)) for example in split.examples]
        return [
            {**{key: told[key][at] for key in told}, "labels": label, "length": len(told["input_ids"][at])}
            for at, label in enumerate(labels)
        ]

    pad, counts, ends = DataCollatorWithPadding(reader), [], []

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
            model=AutoModelForSequenceClassification.from_pretrained(model, num_labels=len(names)),
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=task.batch_texts,
                per_device_eval_batch_size=task.batch_texts,
                num_train_epochs=task.epochs,
                learning_rate=task.lr,
                weight_decay=task.weight_decay / task.lr,  # torch's is times the rate
                adam_beta1=0.9,
                adam_beta2=0.98,
                adam_epsilon=1e-6,
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
            ),
            train_dataset=read(splits["train"]),
            data_collator=collated,
            callbacks=[Ends()],
        )
        trainer.train()
        rates = [
            tokens / (end - before) for tokens, before, end in zip(counts[1:], ends[:-1], ends[1:], strict=False)
        ]  # a step's batch has the place of the step: batches are collated in their order
        found = trainer.predict(read(splits["test"]))  # type: ignore[arg-type]
    right = np.argmax(found.predictions, axis=-1) == found.label_ids
    return statistics.median(rates[SKIPPED:]), float(np.mean(right))


def main(words: Sequence[str] | None = None) -> None:
    """Run the turns, and print a line for each and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of an exported model")
    parser.add_argument("--texts", required=True, help="labelled texts, .tsv, .csv or .jsonl")
    parser.add_argument("--test", required=True, help="others, to be judged by")
    parser.add_argument("--columns", nargs="+", default=["text"])
    parser.add_argument("--label", default="label")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--batch", type=int, default=64, help="texts of a batch")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(words)
    task = TaskConfig(
        kind="single-label",
        train=options.texts,
        validation={"test": options.test},
        text_columns=options.columns,
        label_column=options.label,
        lr=options.lr,
        epochs=options.epochs,
        batch_texts=options.batch,
    )
    splits = read_splits(task)
    found: dict[str, list[tuple[float, float]]] = {OURS: [], **{name: [] for name in THEIRS}}
    for seed in range(1, 1 + options.seeds):
        found[OURS].append(ours(task, options.model, seed))
        for name, sampling in THEIRS.items():
            found[name].append(theirs(task, options.model, splits, seed, sampling))
        for name, turns in found.items():
            print(f"seed {seed}: {name}: {turns[-1][0]:,.0f} tokens/s, accuracy {turns[-1][1]:.4f}", flush=True)
    rows = []
    for name, turns in found.items():
        ratios = [mine[0] / turn[0] for mine, turn in zip(found[OURS], turns, strict=True)]
        scores = [score for _, score in turns]
        spread = f" ± {statistics.stdev(scores):.4f}" if len(scores) > 1 else ""
        rate = f"{statistics.median(rate for rate, _ in turns):,.0f}"
        rows.append([name, rate, f"{statistics.median(ratios):.2f}", f"{statistics.mean(scores):.4f}{spread}"])
    print(markdown_table(["", "tokens/s, median", "finetune is faster by", "accuracy"], rows))


if __name__ == "__main__":
    main()
