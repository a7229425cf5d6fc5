"""A small model pretrained here, then every small task: is it better than its untrained twin, and than a frozen head?

    python -m benchmarks.judged --text 'texts/*.jsonl.zst' --tasks tasks --out runs/judged   # again to go on

Pretrains a ModernBERT of 4.4 million parameters on plain text, within an hour of a CPU core, and fine-tunes it by
`finetune` on each task of `--tasks` that is there, with several seeds one after the other. Beside it in the same table,
by the same code: the same architecture and tokenizer with fresh weights, fine-tuned as long (`untrained:`), and the
pretrained encoder, and the fresh one, with nothing but a linear head trained (`frozen:`). Whatever is done stays in
--out.

Tasks: glue/QNLI/dev.tsv (its first 4,463 pairs to learn from, the last 1,000 to be judged by; sentences of one
paragraph may stand in both), glue/STS-B-open/{train,dev}.tsv, glue/WNLI/{train,dev}.tsv,
other_tasks/banking77_{train,test}.csv, other_tasks/wnut17_{train,dev}.conll.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.prepare import main as prepare
from modernbert_train.__main__ import main as modernbert_train
from modernbert_train.config.load import load_run
from modernbert_train.core.files import write_whole
from modernbert_train.train.session import train

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 8192
QNLI_HELD_OUT = 1000
MODEL: dict[str, Any] = {
    "name": "modernbert",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_layers": 4,
    "num_heads": 4,
    "intermediate_size": 384,
    "init_std": 0.05,
    "attention_out_dropout": 0.0,
}
# one setting for all models, not tuned: small ones want higher rates than the published tables of base and large
TRAINING: dict[str, Any] = {"lr": 5e-4, "weight_decay": 1e-5, "batch_texts": 32, "pooling": "mean", "frozen.epochs": 5}
PAIR = ["sentence1", "sentence2"]
# name -> keys of the task; files under --tasks
TASKS: dict[str, dict[str, Any]] = {
    "banking77": {
        "kind": "single-label",
        "train": "other_tasks/banking77_train.csv",
        "test": "other_tasks/banking77_test.csv",
        "label_column": "category",
        "epochs": 3,
    },
    "stsb": {
        "kind": "regression",
        "train": "glue/STS-B-open/train.tsv",
        "test": "glue/STS-B-open/dev.tsv",
        "text_columns": PAIR,
        "label_column": "score",
        "metrics": ["spearman"],
        "epochs": 4,
    },
    "qnli": {
        "kind": "single-label",
        "train": "glue/QNLI/dev.tsv",
        "text_columns": ["question", "sentence"],
        "epochs": 2,
    },
    "wnli": {
        "kind": "single-label",
        "train": "glue/WNLI/train.tsv",
        "test": "glue/WNLI/dev.tsv",
        "text_columns": PAIR,
        "epochs": 3,
    },
    "wnut17": {
        "kind": "tokens",
        "train": "other_tasks/wnut17_train.conll",
        "test": "other_tasks/wnut17_dev.conll",
        "epochs": 5,
    },
}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="documents, a file or a pattern of .jsonl or .jsonl.zst")
    parser.add_argument("--tasks", type=Path, required=True, help="folder of labelled texts")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/judged", help="where everything stays")
    parser.add_argument("--tokens", type=int, default=3_200_000, help="of pretraining")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="fine-tunings at a time")
    options = parser.parse_args(words)
    run = pretrained(options.text, options.out, options.tokens)
    tasks = write_tasks(options.tasks.absolute(), options.out)
    models = [f"{baseline}{run}" for baseline in ("", "untrained:", "frozen:", "frozen:untrained:")]
    for seed in range(1, 1 + options.seeds):  # all of a seed before the next: what is cut short is comparable
        grid = ["--seeds", str(seed), "--out", str(options.out / "judged"), "--jobs", str(options.jobs)]
        code = modernbert_train(["finetune", *tasks, "--model", *models, *grid, "compute.device=cpu"])
        if code != 0:
            raise SystemExit(code)
    print((options.out / "judged/table.md").read_text(encoding="utf-8"))


def write_tasks(folder: Path, out: Path) -> list[str]:
    """A YAML for each task whose files are there; returns their paths."""
    found = []
    for name, about in TASKS.items():
        train_file, test_file = (folder / about.get(part, "") for part in ("train", "test"))
        if not train_file.is_file():
            continue
        if "test" not in about:  # the train split cannot be had: the last of its dev split are held out
            head, *lines = train_file.read_text(encoding="utf-8").splitlines()
            train_file, test_file = (out / f"{name}_{part}.tsv" for part in ("train", "test"))
            parts = (lines[:-QNLI_HELD_OUT], lines[-QNLI_HELD_OUT:])
            for file, part in zip((train_file, test_file), parts, strict=True):
                write_whole(file, "\n".join([head, *part, ""]))
        task: dict[str, Any] = {key: value for key, value in about.items() if key != "test"}
        task |= {"train": str(train_file), "validation": {"test": str(test_file)}}
        for key, value in TRAINING.items():
            section, _, rest = key.partition(".")
            task |= {section: {rest: value}} if rest else {key: value}
        if task["kind"] == "tokens":
            del task["pooling"]
        write_whole(out / f"{name}.yaml", json.dumps(task, indent=1))
        found.append(str(out / f"{name}.yaml"))
    return found


def pretrained(text: str, out: Path, tokens: int, shape: dict[str, Any] | None = None) -> Path:
    """The run's folder: trained now, or as far as it was left; `shape` is what is other than in MODEL."""
    data = out / "data"
    if not (data / "train").is_dir():
        source = f"sources={{text: {{kind: jsonl, path: '{Path(text).absolute()}'}}}}"
        assert prepare([f"out={data}", source, f"tokenizer.vocab_size={VOCABULARY}"]) == 0
    phase = {"row_tokens": 512, "batch_rows": 8, "microbatch_tokens": 4096}
    schedule = {"warmup_tokens": min(300_000, tokens // 10), "decay_tokens": tokens // 4, "decay": "one_minus_sqrt"}
    run = {
        "name": "pretrained",
        "runs_folder": str(out),
        "seed": 17,
        "data": {part: str(data / part) for part in ("train", "validation", "tokenizer")},
        "model": MODEL | (shape or {}),
        "optim": {"name": "stable_adamw", "lr": 2e-3, "betas": [0.9, 0.98], "weight_decay": 1e-5},
        "phases": {"all": {"tokens": tokens, **phase, "schedule": schedule | {"final_lr_ratio": 0.01}}},
        "eval": {"max_tokens": 50_000},
        "compute": {"device": "cpu", "precision": "fp32"},
        "logging": {"progress_bar": False},
    }
    file = out / "pretrained.yaml"
    write_whole(file, json.dumps(run))  # JSON is YAML
    train(load_run([file], []))
    return out / "pretrained"


if __name__ == "__main__":
    main()
