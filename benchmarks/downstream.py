"""What an encoder is worth to the three ways people use one beside classifiers: retrieval, GLiNER and SetFit.

    python -m benchmarks.downstream --model runs/mine --tasks tasks --out runs/downstream --seeds 2   # again to go on

Each is trained and measured by its verb (`retrieval`, `gliner`, `setfit`), seed after seed; what is finished stays in
--out and is not done again. Retrieval is measured before and after training, SetFit beside a logistic regression on
the frozen encoder.

Tasks: retrieval/scifact_subset (a BEIR folder: learned are its training queries, and each document's first sentence as
a query for the rest of it; nDCG@10 of its test queries), other_tasks/wnut17_{train,dev}.conll and
other_tasks/banking77_{train,test}.csv.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modernbert_train.__main__ import main as modernbert_train
from modernbert_train.text import table

SENTENCES = "sentences.jsonl"  # in --out: pairs of a document's first sentence and the rest of it
# what is done -> its verb, its recipe with files under --tasks, and figures of result.json by what they are called
WORK: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "retrieval-before": ("retrieval evaluate", {}, {"SciFact (part), nDCG@10, as it comes": "ndcg_at_10"}),
    "retrieval": (
        "retrieval train",
        {
            "train": ["retrieval/scifact_subset", SENTENCES],
            "evaluate": {"scifact": "retrieval/scifact_subset"},
            "batch_size": 32,
            "epochs": 2,
            "lr": 3e-4,
            "max_tokens": 128,
        },
        {"SciFact (part), nDCG@10, trained": "ndcg_at_10"},
    ),
    "gliner": (
        "gliner train",
        {
            "train": "other_tasks/wnut17_train.conll",
            "validation": {"dev": "other_tasks/wnut17_dev.conll"},
            "max_types": 6,
            "max_len": 128,
            "max_steps": 600,
            "lr": 5e-4,  # of a small encoder; the recipe's own are for one that knows its language
            "others_lr": 1e-3,
        },
        {"WNUT-17, GLiNER, entity F1": "f1"},
    ),
    "setfit": (
        "setfit train",
        {
            "train": "other_tasks/banking77_train.csv",
            "validation": {"test": "other_tasks/banking77_test.csv"},
            "label_column": "category",
            "shots": 8,
            "max_tokens": 64,
            "num_iterations": 5,
        },
        {
            "Banking77, 8 of a class, SetFit, accuracy": "accuracy",
            "Banking77, 8 of a class, regression on the frozen encoder, accuracy": "baseline/accuracy",
        },
    ),
}


def under(value: Any, tasks: Path) -> Any:
    """A recipe with the paths of what lies under a folder."""
    if isinstance(value, dict):
        return {key: under(each, tasks) for key, each in value.items()}
    if isinstance(value, list):
        return [under(each, tasks) for each in value]
    return str(tasks / value) if isinstance(value, str) and "/" in value else value


def write_sentences(corpus: Path, file: Path) -> None:
    lines = []
    for line in corpus.read_text(encoding="utf-8").splitlines():
        first, _, rest = json.loads(line)["text"].partition(". ")
        if rest:
            lines.append(json.dumps({"query": f"{first}.", "positive": rest}))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def do(name: str, model: str, tasks: Path, out: Path, seed: int) -> dict[str, float]:
    """Figures of one piece of work, done now or before."""
    verb, recipe, _ = WORK[name]
    result = out / f"{name}-{seed}" / "result.json"
    words = [f"runs_folder={out}", f"name={name}-{seed}", f"seed={seed}"]
    if not result.exists():
        if verb == "retrieval evaluate":
            given = str(tasks / "retrieval/scifact_subset")
            words = [f"runs_folder={out}", f"name={name}-{seed}", "max_tokens=128"]
        else:
            given = str(out / f"{name}.yaml")
            if name == "retrieval":
                write_sentences(tasks / "retrieval/scifact_subset/corpus.jsonl", out / SENTENCES)
            text = json.dumps(under(recipe, tasks)).replace(SENTENCES, str(out / SENTENCES))
            Path(given).write_text(text, encoding="utf-8")  # JSON is YAML
        code = modernbert_train([*verb.split(), given, "--model", model, *words])
        if code != 0:
            raise SystemExit(code)
    figures: dict[str, dict[str, float]] = json.loads(result.read_text(encoding="utf-8"))["figures"]
    return next(iter(figures.values()))


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a run, a checkpoint or an exported folder")
    parser.add_argument("--tasks", type=Path, required=True, help="folder of texts")
    parser.add_argument("--out", type=Path, required=True, help="where everything stays")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=WORK, metavar="WORK", help=", ".join(WORK))
    options = parser.parse_args(words)
    tasks, out = options.tasks.absolute(), options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    rows = [["task and figure", "mean and standard deviation", "seeds"]]
    for name in options.only or WORK:
        seeds = range(1, 2 if name == "retrieval-before" else 1 + options.seeds)
        found = [do(name, options.model, tasks, out, seed) for seed in seeds]
        for what, key in WORK[name][2].items():
            values = [figures[key] for figures in found]
            spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
            rows.append([what, f"{statistics.mean(values):.3f}{spread}", str(len(values))])
    print(table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
