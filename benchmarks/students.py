"""A small model trained in three ways, three seeds each, judged by `evaluate` on retrieval and classification.

    python -m benchmarks.students --tasks FOLDER --out runs/students     # again to go on
    python -m benchmarks.students --tasks FOLDER --beside                # pairs a second, beside sentence-transformers

masked: masked tokens alone. contrastive: masked tokens, then pairs (the first sentence of an abstract and the rest of
it). distilled: masked tokens, predictions and hidden states of a larger model of ours. All three read as many tokens of
the same abstracts and begin with the weights of their seed. Retrieval is SciFact's (FOLDER/retrieval/scifact_subset),
whose abstracts are what was read, without further training; classification is Banking77
(FOLDER/other_tasks/banking77_*.csv), 800 texts, 300 to be judged by. Prints means and standard errors over the seeds,
and CPU seconds of the training.

--beside trains the same model on the same pairs here and by sentence-transformers' Trainer with
CachedMultipleNegativesRankingLoss, batches of as many pairs, one thread each, in turns. What starting costs is left
out: a run of few steps is taken off one of many. Then both train masked models of three seeds, by AdamW, and SciFact
judges what comes out.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modernbert_train.core.files import write_whole
from modernbert_train.core.text import markdown_table
from modernbert_train.data.tables import read_rows

SEEDS, TOKENS, VOCABULARY = (1, 2, 3), 240_000, 4096
TURNS, STEPS, LR = 2, (4, 44), 1e-3
MODEL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "num_layers": 2, "num_heads": 2, "intermediate_size": 192,
    "global_attn_every_n_layers": 1, "init_std": 0.05,
}  # fmt: skip
LARGER = {"hidden_size": 192, "num_layers": 4, "num_heads": 3, "intermediate_size": 288}
ROWS = {"row_tokens": 128, "batch_rows": 8, "microbatch_tokens": 1024}
STREAMS = {"text": {"path": "text/train"}, "pairs": {"path": "pairs/train"}}


def phase(tokens: int, stream: str = "text", **others: Any) -> dict[str, Any]:
    """A warm-up of a twentieth, then a linear decay; one stream alone."""
    schedule = {"warmup_tokens": tokens // 20, "decay_tokens": tokens - tokens // 20}
    streams = {name: {"proportion": float(name == stream)} for name in STREAMS}
    return {"tokens": tokens, **ROWS, "streams": streams, "schedule": schedule, **others}


def runs(out: Path) -> dict[str, dict[str, Any]]:
    """What differs between the runs, by arm; the teacher first, with one seed."""
    pairs = phase(TOKENS // 2, "pairs", batch_rows=16)
    teacher = {"name": "distill", "teacher": str(out / "runs/teacher"), "teacher_width": LARGER["hidden_size"]}
    return {
        "teacher": {"model": MODEL | LARGER, "phases": {"masked": phase(600_000)}},
        "masked": {"phases": {"masked": phase(TOKENS)}},
        "contrastive": {
            "objective": {"name": "contrastive", "mlm_head": True},
            "phases": {"masked": phase(TOKENS // 2, objective={"name": "mlm"}), "contrastive": pairs},
            "data": {"validation": str(out / "pairs/validation")},
        },
        "distilled": {"objective": teacher | {"mask_rate": 0.3}, "phases": {"distilled": phase(TOKENS)}},
    }


def prepare(tasks: Path, out: Path) -> None:
    """Text, pairs, labelled texts and the suite."""
    if (out / "suite.yaml").exists():
        return
    abstracts = [json.loads(line)["text"] for line in (tasks / "retrieval/scifact_subset/corpus.jsonl").open()]
    halves = [text.partition(". ") for text in abstracts]
    lines = [json.dumps({"query": first, "positive": rest}) for first, _, rest in halves if len(rest) > 200]
    write_whole(out / "pairs.jsonl", "\n".join(lines) + "\n")
    source = {"kind": "jsonl", "path": str(tasks / "retrieval/scifact_subset/corpus.jsonl")}
    spec = {"out": str(out / "text"), "sources": {"scifact": source}, "validation_share": 0.03}
    write_whole(out / "text.yaml", json.dumps(spec | {"tokenizer": {"vocab_size": VOCABULARY}}))
    command("prepare", str(out / "text.yaml"))
    tokenizer = str(out / "text/tokenizer")
    command("prepare-pairs", str(out / "pairs"), str(out / "pairs.jsonl"), "--tokenizer", tokenizer,
            "--max-tokens", "62", "--validation-share", "0.03")  # fmt: skip
    for name, most in (("train", 800), ("test", 300)):
        rows = [row.texts for row in read_rows(tasks / f"other_tasks/banking77_{name}.csv", ("text", "category"))]
        chosen = rows[:: len(rows) // most][:most]
        write_whole(out / f"{name}.jsonl", "".join(json.dumps(dict(text=t, label=c)) + "\n" for t, c in chosen))
    task: dict[str, Any] = {
        "kind": "single-label",
        "train": str(out / "train.jsonl"),
        "validation": {"test": str(out / "test.jsonl")},
    }
    task |= {"lr": 1e-3, "epochs": 4, "batch_texts": 16, "max_tokens": 64, "pooling": "mean"}
    write_whole(out / "banking77.yaml", json.dumps(task))
    scifact = {"beir": str((tasks / "retrieval/scifact_subset").absolute())}
    suite = {
        "scifact": scifact | {"keys": {"device": "cpu", "max_tokens": 128}},
        "banking77": {"finetune": "banking77.yaml", "keys": {"compute.threads": 1}},
    }
    write_whole(out / "suite.yaml", json.dumps({"tasks": suite, "seeds": [1]}))


def train(name: str, arm: dict[str, Any], seed: int, out: Path) -> float:
    """A run; its CPU seconds."""
    data: dict[str, Any] = {"streams": {key: {"path": str(out / each["path"])} for key, each in STREAMS.items()}}
    data |= {"tokenizer": str(out / "text/tokenizer"), "validation": str(out / "text/validation"), "num_workers": 0}
    run = {"model": MODEL, "optim": {"name": "stable_adamw", "lr": 3e-3}, **arm, "name": name, "seed": seed}
    run |= {"data": data | arm.get("data", {}), "runs_folder": str(out / "runs"), "eval": {"max_tokens": 20_000}}
    run |= {"compute": {"device": "cpu", "threads": 1, "precision": "fp32"}}
    write_whole(out / f"{name}.yaml", json.dumps(run))
    return command("train", str(out / f"{name}.yaml"))


def command(*words: str, module: str = "modernbert_train") -> float:
    """One of the command line; its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", module, *words], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def beside(out: Path) -> None:
    """Print pairs a second of both, by the clock and by CPU seconds."""
    one = {"row_tokens": 512, "batch_rows": 8, "microbatch_tokens": 2048, "schedule": {"warmup_tokens": 4096}}
    data = {"streams": {"pairs": {"path": str(out / "pairs/train")}}, "validation": None}
    spent: dict[str, list[tuple[float, float, int]]] = {}  # wall seconds, CPU seconds and pairs of each run
    for turn in range(TURNS):
        for steps in STEPS:
            name, phases = f"beside-{turn}-{steps}", {"pairs": one | {"tokens": steps * 4096}}
            arm = {"objective": {"name": "contrastive"}, "phases": phases, "data": data}
            began = time.perf_counter()
            cpu = train(name, arm, 1, out)
            wall, lines = time.perf_counter() - began, (out / "runs" / name / "metrics.jsonl").read_text().splitlines()
            trained = [line["predicted"] for line in map(json.loads, lines) if line["kind"] == "step"]
            spent.setdefault("here", []).append((wall, cpu, sum(trained)))
            if not (out / "runs/beside-0-4/hf").exists():
                command("export", str(out / "runs" / name))
            batch, began = round(statistics.fmean(trained)), time.perf_counter()
            cpu = command("--theirs", str(out / "runs/beside-0-4"), str(out / "theirs"), str(batch), str(len(trained)),
                          "1", module="benchmarks.students")  # fmt: skip
            spent.setdefault("sentence-transformers", []).append(
                (time.perf_counter() - began, cpu, batch * len(trained))
            )
    rows, rates = [], {}
    for who, found in spent.items():
        each = [[b - a for a, b in zip(*two, strict=True)] for two in zip(found[::2], found[1::2], strict=True)]
        rates[who] = [[pairs / wall for wall, _, pairs in each], [pairs / cpu for _, cpu, pairs in each]]
        rows.append([who, *(", ".join(f"{rate:.1f}" for rate in some) for some in rates[who])])
    print(markdown_table(["", "pairs a second", "pairs a CPU second"], rows))
    ratios = [[a / b for a, b in zip(*both, strict=True)] for both in zip(*rates.values(), strict=True)]
    print("here over there:", "; ".join(", ".join(f"{ratio:.2f}" for ratio in some) for some in ratios))


def judged(out: Path) -> None:
    """Print SciFact's nDCG@10 of both, each from the same masked models."""
    shape = {"row_tokens": 512, "batch_rows": 8, "microbatch_tokens": 2048, "tokens": STEPS[1] * 4096}
    schedule = {"warmup_tokens": 4 * 4096, "decay_tokens": (STEPS[1] - 4) * 4096}
    for seed in SEEDS:
        start, here = out / f"runs/start-{seed}", f"here-{seed}"
        if not (start / "hf").exists():
            train(start.name, {"phases": {"masked": phase(TOKENS // 2)}}, seed, out)
            command("export", str(start))
        train(here, {
            "objective": {"name": "contrastive"},
            "phases": {"pairs": {**shape, "schedule": schedule}},
            "data": {"streams": {"pairs": {"path": str(out / "pairs/train")}}, "validation": None},
            "weights": {"init_from": str(start)},
            "optim": {"name": "adamw", "lr": LR, "betas": [0.9, 0.999], "weight_decay": 0.0},
        }, seed, out)  # fmt: skip
        lines = (out / "runs" / here / "metrics.jsonl").read_text().splitlines()
        trained = [line["predicted"] for line in map(json.loads, lines) if line["kind"] == "step"]
        batch = round(statistics.fmean(trained))
        command("--theirs", str(start), str(out / f"runs/theirs-{seed}"), str(batch), str(len(trained)), str(seed),
                module="benchmarks.students")  # fmt: skip
    arms = ("start", "here", "theirs")
    models = [str(out / "runs" / f"{arm}-{seed}") for arm in arms for seed in SEEDS]
    suite = json.loads((out / "suite.yaml").read_text(encoding="utf-8"))
    write_whole(out / "scifact.yaml", json.dumps(suite | {"tasks": {"scifact": suite["tasks"]["scifact"]}}))
    command("evaluate", *models, "--suite", str(out / "scifact.yaml"), "--out", str(out / "judged-beside"))
    found = json.loads((out / "judged-beside/table.json").read_text(encoding="utf-8"))["rows"]
    rows = []
    for arm in arms:
        own = [row["cells"][0]["seeds"] for row in found if Path(row["source"]).name.partition("-")[0] == arm]
        rows.append([arm, _mean([100 * next(iter(each.values())) for each in own])])
    print(markdown_table(["", "scifact"], rows))


def theirs(start: Path, target: Path, batch: int, steps: int, seed: int) -> None:
    """So many steps of sentence-transformers' Trainer, from the export of a run."""
    import torch
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
    from transformers import AutoModelForMaskedLM

    torch.set_num_threads(1)
    model = SentenceTransformer(str(start / "hf"), device="cpu")
    model.max_seq_length = 62
    rows = [json.loads(line) for line in (start.parent.parent / "pairs.jsonl").read_text().splitlines()]
    options = SentenceTransformerTrainingArguments(
        str(target), per_device_train_batch_size=batch, max_steps=steps, learning_rate=LR, use_cpu=True, seed=seed,
        warmup_steps=4, save_strategy="no", report_to=[], disable_tqdm=True, dataloader_num_workers=0,
        dataloader_drop_last=True,
    )  # fmt: skip
    loss = CachedMultipleNegativesRankingLoss(model, mini_batch_size=batch // 2)
    SentenceTransformerTrainer(model=model, args=options, train_dataset=Dataset.from_list(rows), loss=loss).train()
    masked = AutoModelForMaskedLM.from_pretrained(start / "hf")  # `evaluate` reads models whole
    trained: Any = model[0]
    masked.base_model.load_state_dict(trained.auto_model.state_dict())
    shutil.copytree(start / "hf", target, dirs_exist_ok=True)
    masked.save_pretrained(target)


def main(words: Sequence[str] | None = None) -> None:
    """Train what is missing, judge it, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=Path, help="folder of labelled texts")
    parser.add_argument("--out", type=Path, default=Path("runs/students"), help="where everything stays")
    parser.add_argument("--beside", action="store_true", help="pairs alone, beside sentence-transformers")
    parser.add_argument("--theirs", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.theirs:
        start, target, *numbers = options.theirs
        theirs(Path(start), Path(target), *map(int, numbers))
        return
    out: Path = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    prepare(options.tasks, out)
    if options.beside:
        beside(out)
        judged(out)
        return
    record = out / "seconds.json"
    seconds: dict[str, float] = json.loads(record.read_text()) if record.exists() else {}
    for arm, keys in runs(out).items():
        for seed in SEEDS[:1] if arm == "teacher" else SEEDS:
            name = arm if arm == "teacher" else f"{arm}-{seed}"
            if name not in seconds:
                seconds[name] = train(name, keys, seed, out)
                write_whole(record, json.dumps(seconds))
    models = [str(out / "runs" / name) for name in seconds]
    judging = command("evaluate", *models, "--suite", str(out / "suite.yaml"), "--out", str(out / "judged"))
    found = json.loads((out / "judged/table.json").read_text(encoding="utf-8"))
    rows = []
    for arm in runs(out):
        own = [row for row in found["rows"] if Path(row["source"]).name.partition("-")[0] == arm]
        cells = [[100 * next(iter(row["cells"][at]["seeds"].values())) for row in own] for at in range(2)]
        spent = statistics.fmean(each for name, each in seconds.items() if name.partition("-")[0] == arm)
        rows.append([arm, *map(_mean, cells), f"{spent:.0f}"])
    print(markdown_table(["", *(column["task"] for column in found["columns"]), "CPU s of training"], rows))
    print(f"judging: {judging:.0f} CPU s")


def _mean(values: Sequence[float]) -> str:
    error = f" ± {statistics.stdev(values) / math.sqrt(len(values)):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{error}"


if __name__ == "__main__":
    main()
