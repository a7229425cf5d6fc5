"""Objectives on one encoder, and ways to share its layers, on one text with one budget; judged by tasks.

    python -m benchmarks.objectives --text 'books/*.jsonl.zst' --tasks tasks   # hours on a core; again to go on
    python -m benchmarks.objectives --text ... --tasks ... --only mlm rtd --seeds 1

Every system trains a small model from scratch for the same FLOPs by `plan`, on the same text with one tokenizer. It is
judged by what others can tell from it and not by its own loss, whose meaning differs: a linear classifier on the frozen
mean-pooled encoder (accuracy), and fine-tuning of the exported model with transformers (accuracy; Spearman's rho for
scores). Which of two neighbouring passages of a held-out text stood first is one more thing to tell. Systems that share
layers have one objective, so their held-out loss is shown too. `untrained` is the same encoder before training.

Everything that is done stays in --out: a run that was cut goes on where it was, a result is computed once, and a file
beside it has every number. A cell is the mean over seeds, then the standard deviation of single seeds; a star marks a
mean that differs from the first row's by more than two standard errors of the difference, with two seeds or more.

`--tasks` holds glue/QNLI/dev.tsv, glue/STS-B-open/{train,dev}.tsv and other_tasks/banking77_{train,test}.csv; what is
not there is left out.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import random
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from data_prep.prepare import main as prepare
from modernbert_train.config.load import load_run
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.check import check_data
from modernbert_train.data.open_shards import open_shards
from modernbert_train.files import write_whole
from modernbert_train.plan.make import make_plan
from modernbert_train.run.run_folder import RunFolder
from modernbert_train.text import markdown_table
from modernbert_train.train.session import train
from modernbert_train.weights.export import export_run

ROOT = Path(__file__).resolve().parent.parent

MODERNBERT: dict[str, Any] = {
    "hidden_size": 192,
    "num_layers": 4,
    "num_heads": 3,
    "intermediate_size": 288,
    "init_std": 0.05,
}
ALBERT: dict[str, Any] = {"hidden_size": 192, "num_layers": 5, "num_heads": 3, "intermediate_size": 768}
ALBERT |= {"embedding_size": 128, "dropout": 0.0, "init_std": 0.05}
VOCABULARY = 8192
ROW_TOKENS = 256
ORDER_PAIRS = 2000


@dataclass(frozen=True)
class System:
    """What is compared.

    Attributes:
        objective, model: sections of the run.
        rate: of learning, at most.
        trained: False: judged as it begins.
    """

    objective: dict[str, Any]
    model: dict[str, Any]
    rate: float = 2e-3
    trained: bool = True


def _modernbert(**objective: Any) -> System:
    return System(objective, {"name": "modernbert", **MODERNBERT})


def _albert(sharing: str) -> System:
    # norms after the residuals: with ModernBERT's rate it stays at the unigram plateau
    return System({"name": "mlm"}, {"name": "albert", "sharing": sharing, **ALBERT}, rate=5e-4)


# the first of each table is what the others are compared with
OBJECTIVES = {
    "mlm": _modernbert(name="mlm"),
    "mlm, n-grams": _modernbert(name="mlm", masking="ngram"),
    "sop": _modernbert(name="sop"),
    "permutation": _modernbert(name="permutation"),
    "rtd": _modernbert(name="rtd", sharing="gdes"),
    "causal": _modernbert(name="causal"),
    "untrained": replace(_modernbert(name="mlm"), trained=False),
}
SHARING = {f"share {what}": _albert(what) for what in ("none", "attention", "ffn", "all")}
SYSTEMS = OBJECTIVES | SHARING


class Example(NamedTuple):
    """Texts with the number of their class, or a score."""

    texts: tuple[str, ...]
    label: int | float


@dataclass(frozen=True)
class Task:
    """Labelled texts to fine-tune on.

    Attributes:
        train, test: to learn from and to be judged by.
        num_classes: 0: scores, measured by Spearman's rho; else accuracy.
    """

    train: list[Example]
    test: list[Example]
    num_classes: int


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="documents, a file or a pattern of .jsonl or .jsonl.zst")
    parser.add_argument("--tasks", type=Path, required=True, help="folder of labelled texts")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/objectives", help="where everything stays")
    parser.add_argument("--tokens", type=int, default=500_000, help="of the first system; others get its FLOPs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="systems; all")
    options = parser.parse_args(words)
    started = time.monotonic()
    data = options.out / "data"
    if not (data / "train").is_dir():
        source = f"sources={{text: {{kind: jsonl, path: '{Path(options.text).absolute()}'}}}}"
        assert prepare([f"out={data}", source, f"tokenizer.vocab_size={VOCABULARY}"]) == 0
    order = options.out / "order.tsv"
    if not order.exists():
        write_order_pairs(data, order)
    probes, tasks = probes_of(options.tasks, order), tasks_of(options.tasks, order)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in options.only}
    for seed in range(1, 1 + options.seeds):  # all systems of a seed before the next: what is cut short is comparable
        for name in options.only:
            found[name].append(measure(name, seed, options.out, data, options.tokens, probes, tasks))
            tell(found, options.tokens)
    print(f"\n{(time.monotonic() - started) / 60:.1f} minutes")


def measure(
    name: str, seed: int, out: Path, data: Path, tokens: int, probes: dict[str, dict[str, Any]], tasks: dict[str, Task]
) -> dict[str, float]:
    """Figures of one system and seed: out of its file, or trained, probed and fine-tuned now."""
    system = SYSTEMS[name]
    settings = json.dumps([asdict(system), ROW_TOKENS, VOCABULARY, tokens], sort_keys=True).encode()
    run_name = f"{re.sub('[^a-z]+', '-', name)}-{hashlib.sha256(settings).hexdigest()[:8]}-{seed}"
    stored = out / f"{run_name}.json"
    if stored.exists():
        return dict(json.loads(stored.read_text(encoding="utf-8")))
    config = config_of(system, seed, run_name, out, data, tokens, probes)
    train(config)
    metrics = RunFolder(config).read_metrics()
    evaluations = {each["name"]: each["figures"] for each in metrics if each["kind"] == "evaluation"}
    figures = {f"probe {probe}": told["accuracy"] for probe, told in evaluations.items()}
    figures |= {f"guess {probe}": told["baseline/accuracy"] for probe, told in evaluations.items()}
    last = [each for each in metrics if each["kind"] == "validation"][-1]
    figures |= {"held-out loss": last["loss"], "tokens": float(config.total_tokens)}
    figures |= {key: value for key, value in last.items() if key.endswith("/accuracy")}
    folder = export_run(config)
    for task, content in tasks.items():
        figures[f"tuned {task}"] = fine_tuned(folder, content, seed)
        print(f"{run_name}: fine-tuned on {task}: {figures[f'tuned {task}']:.3f}", flush=True)
    write_whole(stored, json.dumps(figures, indent=1))
    shutil.rmtree(RunFolder(config).path / "checkpoints", ignore_errors=True)
    return figures


def config_of(
    system: System, seed: int, name: str, out: Path, data: Path, tokens: int, probes: dict[str, dict[str, Any]]
) -> RunConfig:
    """The run of a system, with as many tokens as the budget gives it."""

    def config(system: System, tokens: int) -> RunConfig:
        rate = system.rate if system.trained else 1e-12
        words = {
            "name": name,
            "runs_folder": str(out / "runs"),
            "seed": seed,
            "data": {part: str(data / part) for part in ("train", "validation", "tokenizer")},
            "model": {"vocab_size": VOCABULARY, **system.model},
            "objective": system.objective,
            "optim": {"name": "stable_adamw", "lr": rate, "betas": [0.9, 0.98], "weight_decay": 1e-5},
            "phases": {
                "all": {
                    "tokens": tokens,
                    "row_tokens": ROW_TOKENS,
                    "batch_rows": 8,
                    "microbatch_tokens": 2048,
                    "schedule": {
                        "warmup_tokens": tokens // 20,
                        "decay_tokens": tokens // 4,
                        "decay": "one_minus_sqrt",
                        "final_lr_ratio": 0.01,
                    },
                }
            },
            "eval": {"times_per_phase": 1, "max_tokens": 100_000},
            "evals": probes,
            "compute": {"device": "cpu", "precision": "fp32"},
            "logging": {"progress_bar": False},
        }
        file = out / f"{name}.yaml"
        write_whole(file, json.dumps(words))  # JSON is YAML
        return load_run([file], [])

    if not system.trained:
        return config(system, ROW_TOKENS)
    first = OBJECTIVES["mlm"] if system in OBJECTIVES.values() else SHARING["share none"]

    def flops(each: System) -> float:
        return make_plan(config(each, tokens), ranks=1).phases[0].flops.training

    return config(system, round(tokens * flops(first) / flops(system)))


def probes_of(folder: Path, order: Path) -> dict[str, dict[str, Any]]:
    """What the frozen encoder is asked while it trains, as sections of `evals`."""
    every: dict[str, dict[str, Any]] = {
        "banking77": {
            "train": folder / "other_tasks/banking77_train.csv",
            "test": folder / "other_tasks/banking77_test.csv",
            "label_column": "category",
            "max_examples": 1000,
        },
        "qnli": {"train": folder / "glue/QNLI/dev.tsv", "text_columns": ["question", "sentence"]},
        "order": {"train": order, "text_columns": ["first", "second"]},
    }
    return {
        name: {"name": "probe", **{key: str(v) if isinstance(v, Path) else v for key, v in section.items()}}
        for name, section in every.items()
        if Path(section["train"]).exists()
    }


def tasks_of(folder: Path, order: Path) -> dict[str, Task]:
    """What exported models are fine-tuned on: at most 2,000 texts to learn from and 1,500 to be judged by."""
    found: dict[str, Task] = {}
    banking = [folder / f"other_tasks/banking77_{part}.csv" for part in ("train", "test")]
    if all(path.exists() for path in banking):
        train, test = (read(path, ",") for path in banking)
        classes = {name: number for number, name in enumerate(sorted({row["category"] for row in train}))}
        told = [[Example((row["text"],), classes[row["category"]]) for row in part] for part in (train, test)]
        found["banking77"] = Task(drawn(told[0], 2000), drawn(told[1], 1500), len(classes))
    scores = [folder / f"glue/STS-B-open/{part}.tsv" for part in ("train", "dev")]
    if all(path.exists() for path in scores):
        told = [
            [Example((row["sentence1"], row["sentence2"]), float(row["score"]) / 5) for row in read(path, "\t")]
            for path in scores
        ]
        found["sts-b"] = Task(drawn(told[0], 2000), drawn(told[1], 1500), 0)
    pairs = [Example((row["first"], row["second"]), int(row["label"] == "swapped")) for row in read(order, "\t")]
    found["order"] = Task(pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :], 2)
    return found


def read(path: Path, delimiter: str) -> list[dict[str, str]]:
    """Rows of a table, by the names of its columns; in one with tabs quotes are characters."""
    with path.open(encoding="utf-8", newline="") as file:
        if delimiter == "\t":
            return list(csv.DictReader(file, delimiter=delimiter, quoting=csv.QUOTE_NONE))
        return list(csv.DictReader(file, delimiter=delimiter))


def drawn(examples: Sequence[Example], most: int) -> list[Example]:
    """The same for every system and seed."""
    return random.Random(0).sample(examples, min(most, len(examples)))


def write_order_pairs(data: Path, out: Path) -> None:
    """Neighbouring passages of four sentences in held-out documents, half of them swapped."""
    words = [f"data.{part}={data / part}" for part in ("train", "validation", "tokenizer")]
    config = load_run([ROOT / "yamls/quickstart.yaml"], words)
    facts = check_data(config)
    assert facts.validation is not None
    shards = open_shards(facts.validation, config.data, facts.vocabulary)
    tokenizer = Tokenizer.from_file(str(data / "tokenizer/tokenizer.json"))
    draw, rows = random.Random(1), []
    for document in range(len(shards.lengths)):
        text = " ".join(tokenizer.decode(shards.read(document)[:20_000].tolist()).split())
        sentences = re.split(r"(?<=[.!?])\s+", text)
        for at in range(0, len(sentences) - 7, 8):
            first, second = (" ".join(sentences[at + step : at + step + 4]) for step in (0, 4))
            if all(100 < len(part) < 600 for part in (first, second)):
                rows.append((first, second))
    pairs = draw.sample(rows, min(ORDER_PAIRS, len(rows)))
    lines = ["first\tsecond\tlabel"]
    for number, (first, second) in enumerate(pairs):
        lines.append("\t".join((second, first, "swapped") if number % 2 else (first, second, "right")))
    write_whole(out, "\n".join([*lines, ""]))


def fine_tuned(folder: Path, task: Task, seed: int) -> float:
    """Accuracy or Spearman's rho of an exported encoder with a new linear head on the mean of its states.

    Four passes in batches of 32 texts by AdamW, 1e-3 at most after a tenth, then linearly to 0: one setting for all.
    """
    from transformers import AutoModel, AutoTokenizer, logging

    logging.set_verbosity_error()
    torch.manual_seed(seed)
    tokenizer, encoder = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    head = nn.Linear(encoder.config.hidden_size, task.num_classes or 1)
    weights = [*encoder.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.01)
    steps = 4 * math.ceil(len(task.train) / 32)

    def ratio(at: int) -> float:
        return min(10 * (at + 1) / steps, (steps - at) / (0.9 * steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, ratio)

    def told(texts: Sequence[tuple[str, ...]]) -> Tensor:
        batch = tokenizer(
            *([text[part] for text in texts] for part in range(len(texts[0]))),
            padding=True,
            truncation=True,
            max_length=ROW_TOKENS,
            return_tensors="pt",
        )
        states = encoder(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1)
        return head((states * mask).sum(1) / mask.sum(1))

    draw = random.Random(seed)
    encoder.train()
    for _ in range(4):
        for examples in batches(draw.sample(task.train, len(task.train))):
            out, wanted = told([each.texts for each in examples]), torch.tensor([each.label for each in examples])
            loss = F.cross_entropy(out, wanted) if task.num_classes else F.mse_loss(out[:, 0].sigmoid(), wanted)
            loss.backward()
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    encoder.eval()
    with torch.no_grad():
        out = torch.cat([told([each.texts for each in examples]) for examples in batches(task.test)])
    wanted = torch.tensor([each.label for each in task.test])
    return float((out.argmax(-1) == wanted).float().mean()) if task.num_classes else spearman(out[:, 0], wanted)


def batches(examples: Sequence[Example]) -> list[Sequence[Example]]:
    return [examples[at : at + 32] for at in range(0, len(examples), 32)]


def spearman(first_N: Tensor, second_N: Tensor) -> float:
    """Correlation of the ranks; equal values share the mean of theirs."""

    def ranks(x_N: Tensor) -> Tensor:
        return (x_N[:, None] > x_N).double().sum(1) + 0.5 * (x_N[:, None] == x_N).double().sum(1)

    return float(torch.corrcoef(torch.stack((ranks(first_N), ranks(second_N))))[0, 1])


def tell(found: dict[str, list[dict[str, float]]], tokens: int) -> None:
    """Both tables, of what is there."""
    for systems, also in ((OBJECTIVES, []), (SHARING, ["held-out loss"])):
        there = {name: found[name] for name in systems if found.get(name)}
        if there:
            columns = [key for key in next(iter(there.values()))[0] if key.startswith(("probe", "tuned"))]
            print("\n" + tables(there, [*also, *columns]), flush=True)


def tables(found: dict[str, list[dict[str, float]]], columns: Sequence[str]) -> str:
    """Markdown: a system a row; see the module."""
    reference = next(iter(found.values()))
    rows = []
    for name, results in found.items():
        cells = [name, str(len(results)), f"{mean(each['tokens'] for each in results):,.0f}"]
        cells += [cell([each[key] for each in results], [each[key] for each in reference]) for key in columns]
        rows.append(cells)
    return markdown_table(["", "seeds", "tokens", *columns], rows)


def cell(values: Sequence[float], reference: Sequence[float]) -> str:
    """`0.512 +- 0.013 *`; see the module."""
    if len(values) < 2 or len(reference) < 2:
        return f"{mean(values):.3f}"
    error = math.sqrt(stdev(values) ** 2 / len(values) + stdev(reference) ** 2 / len(reference))
    star = " *" if abs(mean(values) - mean(reference)) > 2 * error else ""
    return f"{mean(values):.3f} ± {stdev(values):.3f}{star}"


if __name__ == "__main__":
    main()
