"""A table of `evaluate --suite` beside the same table by plain scripts: transformers' Trainer, sentence-transformers.

    python -m benchmarks.suite MODEL untrained:MODEL ANOTHER --tasks FOLDER --out runs/suite     # again to go on

Fine-tunes and measures the models on three small tasks of finetune_tasks.py and on a part of SciFact
(FOLDER/retrieval/scifact_subset), three seeds each; of Banking77 the better of two rates counts. Then the same by their
own code from the same exports, with the same texts, batches, rates, epochs and seeds, one after the other in this
process. Prints, for every cell, both means with their standard errors and by how many standard errors of their
difference they are apart; and CPU seconds of both, of `evaluate` with the start of a process for each run.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.finetune import theirs
from benchmarks.finetune_tasks import small_tasks
from modernbert_train.core.files import write_whole
from modernbert_train.core.text import markdown_table
from modernbert_train.evaluate.finetune.examples import read_splits
from modernbert_train.evaluate.finetune.task import named_model, read_task
from modernbert_train.evaluate.retrieval.runs import exported_encoder

SEEDS = [1, 2, 3]
KEYS: dict[str, dict[str, Any]] = {
    "banking77": {"epochs": 3, "batch_texts": 16, "pooling": None},
    "stsb": {"epochs": 2, "lr": 5e-4, "pooling": None},
    "wnut17": {"epochs": 3, "lr": 5e-4},
}
CHOICES = {"banking77": {"lr": [3e-4, 1e-3]}}
SCIFACT = "retrieval/scifact_subset"
RECIPE: dict[str, Any] = {"batch_size": 16, "epochs": 2, "lr": 5e-4, "max_tokens": 48, "pooling": "mean"}


def write_suite(tasks: Path, out: Path) -> Path:
    """The suite, with its tasks and its recipe beside it."""
    files = small_tasks(tasks, out / "tasks")
    suite: dict[str, Any] = {}
    for name, keys in KEYS.items():
        chosen = {"choices": CHOICES[name], "choose_seeds": 1} if name in CHOICES else {}
        suite[name] = {"finetune": str(files[name].absolute()), "keys": keys, "split": "test", **chosen}
    scifact = str((tasks / SCIFACT).absolute())
    write_whole(out / "scifact.yaml", json.dumps({"train": [scifact], "evaluate": {"test": scifact}, **RECIPE}))
    suite["scifact"] = {"retrieval": "scifact.yaml", "keys": {"device": "cpu"}}
    write_whole(out / "suite.yaml", json.dumps({"tasks": suite, "seeds": SEEDS}, indent=1))
    return out / "suite.yaml"


def evaluate(models: Sequence[str], suite: Path, out: Path) -> float:
    """Run the suite; CPU seconds of all processes that were waited for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = [sys.executable, "-m", "modernbert_train", "evaluate", *models, "--suite", str(suite), "--out", str(out)]
    subprocess.run([*words, "compute.device=cpu"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def their_figure(name: str, out: Path, model: str, seed: int, choice: str) -> float:
    """A run of the suite by a plain script."""
    named = named_model(model)
    with exported_encoder(named.source) as folder:
        if name == "scifact":
            return _retrieval(out / "scifact.yaml", folder, seed, fresh=bool(named.baseline))
        words = [f"{key}={'null' if value is None else value}" for key, value in KEYS[name].items()]
        task, _ = read_task(str(out / f"tasks/{name}.yaml"), [*words, *filter(None, [choice])])
        task = replace(task, pooling="mean")  # BERT's class reads the first token, whatever this says
        return theirs(task, read_splits(task), folder, seed, "random", fresh=bool(named.baseline))[1]


def _retrieval(recipe: Path, folder: Path, seed: int, fresh: bool) -> float:
    """nDCG@10 by sentence-transformers' trainer and evaluator."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer import losses, modules
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
    from transformers import AutoConfig, AutoModel, set_seed

    set_seed(seed)
    keys = json.loads(recipe.read_text())
    encoder = modules.Transformer(str(folder), max_seq_length=keys["max_tokens"])
    if fresh:
        encoder.auto_model.load_state_dict(AutoModel.from_config(AutoConfig.from_pretrained(folder)).state_dict())
    pooled = modules.Pooling(encoder.get_word_embedding_dimension(), keys["pooling"])
    model = SentenceTransformer(modules=[encoder, pooled, modules.Normalize()], device="cpu")
    beir = Path(keys["train"][0])
    lines = {name: _lines(beir / f"{name}.jsonl") for name in ("corpus", "queries")}
    texts: Any = {each["_id"]: f"{each.get('title', '')} {each['text']}".strip() for each in lines["corpus"]}
    queries = {each["_id"]: each["text"] for each in lines["queries"]}
    pairs = [(queries[query], texts[text]) for query, text in _judged(beir / "qrels/train.tsv")]
    with tempfile.TemporaryDirectory() as out:
        arguments = SentenceTransformerTrainingArguments(
            output_dir=out, per_device_train_batch_size=keys["batch_size"], num_train_epochs=keys["epochs"],
            learning_rate=keys["lr"], warmup_steps=0.05, lr_scheduler_type="linear", seed=seed, use_cpu=True,
            batch_sampler="no_duplicates", dataloader_drop_last=True, report_to="none", save_strategy="no",
            disable_tqdm=True,
        )  # fmt: skip
        data = Dataset.from_dict(dict(zip(("anchor", "positive"), map(list, zip(*pairs, strict=True)), strict=True)))
        loss = losses.MultipleNegativesRankingLoss(model)
        SentenceTransformerTrainer(model=model, args=arguments, train_dataset=data, loss=loss).train()
    relevant: dict[str, set[str]] = {}
    for query, text in _judged(beir / "qrels/test.tsv"):
        relevant.setdefault(query, set()).add(text)
    asked: Any = {query: queries[query] for query in relevant}
    found = InformationRetrievalEvaluator(asked, texts, relevant, batch_size=32, ndcg_at_k=[10])(model)
    return next(value for key, value in found.items() if key.endswith("ndcg@10"))


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _judged(file: Path) -> list[tuple[str, str]]:
    rows = [line.split("\t") for line in file.read_text(encoding="utf-8").splitlines()[1:]]
    return [(query, text) for query, text, score in rows if int(score) > 0]


def table(found: dict[str, Any], turns: Sequence[dict[str, Any]]) -> str:
    """A line for each cell."""
    rows = []
    for row in found["rows"]:
        for column, cell in zip(found["columns"], row["cells"], strict=True):
            at = {"task": column["task"], "model": row["source"], "choice": cell["chosen"]}
            theirs = [
                turn["figure"] for turn in turns if at.items() <= turn.items() and str(turn["seed"]) in cell["seeds"]
            ]
            ours = list(cell["seeds"].values())
            apart = statistics.fmean(ours) - statistics.fmean(theirs)
            error = math.hypot(_error(ours), _error(theirs))
            shown = [f"{100 * statistics.fmean(each):.2f} ± {100 * _error(each):.2f}" for each in (ours, theirs)]
            rows.append([f"{row['model']}, {column['task']}", *shown, f"{apart / error:+.1f}" if error else "-"])
    return markdown_table(["model, task", "`evaluate`", "plain scripts", "apart"], rows)


def _error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def main(words: Sequence[str] | None = None) -> None:
    """Run what is missing of both, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="as `evaluate` takes them")
    parser.add_argument("--tasks", type=Path, required=True, help="folder of labelled texts")
    parser.add_argument("--out", type=Path, default=Path("runs/suite"), help="where everything stays")
    options = parser.parse_args(words)
    out, record = options.out, options.out / "turns.jsonl"
    if not (options.tasks / SCIFACT).is_dir():
        parser.exit(0, f"skipped: {options.tasks / SCIFACT} is not there\n")
    seconds = evaluate(options.models, write_suite(options.tasks, out), out / "evaluate")
    turns = _lines(record) if record.exists() else []
    turns.append({"task": "", "seconds": seconds})
    found = json.loads((out / "evaluate/table.json").read_text(encoding="utf-8"))
    with record.open("a", encoding="utf-8") as file:
        file.write(json.dumps(turns[-1]) + "\n")
        for row in found["rows"]:
            for column, cell in zip(found["columns"], row["cells"], strict=True):
                for run in cell["runs"]:
                    at = {"task": column["task"], "model": row["source"], "choice": run["choice"], "seed": run["seed"]}
                    if any(at.items() <= turn.items() for turn in turns):
                        continue
                    began = time.process_time()
                    figure = their_figure(at["task"], out, at["model"], at["seed"], at["choice"])
                    turns.append({**at, "figure": figure, "seconds": time.process_time() - began})
                    file.write(json.dumps(turns[-1]) + "\n")
                    file.flush()
                    print(f"{row['model']}, {at}: {run['value']:.4f}, {figure:.4f}", flush=True)
    print(table(found, turns))
    ours, plain = (sum(turn["seconds"] for turn in turns if bool(turn["task"]) == theirs) for theirs in (False, True))
    print(f"CPU seconds: {ours:,.0f} of evaluate, {plain:,.0f} of plain scripts; ratio {ours / plain:.2f}")


if __name__ == "__main__":
    main()
