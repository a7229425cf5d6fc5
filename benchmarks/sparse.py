"""A sparse retriever (SPLADE) trained here: nDCG@10 and terms before and after, on a BEIR folder.

    python -m benchmarks.sparse --beir scifact_subset --out sparse    # restartable

pretrains a small masked LM on the documents of the folder (`sparse.yaml`), measures it with `pooling=sparse`, trains
it by `retrieval train`, and measures it again. The pairs are the judgements of the folder's training split, and for
each document its first sentence and the rest. No test query is trained on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from modernbert_train.__main__ import main as modernbert_train
from modernbert_train.core.files import write_whole

RECIPE: dict[str, Any] = {
    "batch_size": 32, "epochs": 2, "lr": 5e-4, "scale": 0.03, "warmup": 0.1, "max_tokens": 128, "pooling": "sparse",
}  # fmt: skip
FLOPS = ("objective.query_flops=1e-4", "objective.document_flops=5e-5")
SHOWN = ("ndcg_at_10", "recall_at_100", "query_terms", "document_terms")


def must(*words: str) -> None:
    """Run a verb; SystemExit if it fails."""
    if code := modernbert_train([*words]):
        raise SystemExit(f"{' '.join(words[:2])}: exit code {code}")


def write_text(beir: Path, out: Path) -> tuple[Path, Path]:
    """Write the documents as JSON lines, and pairs of a document's first sentence and the rest of it."""
    documents = [json.loads(line)["text"] for line in (beir / "corpus.jsonl").read_text(encoding="utf-8").splitlines()]
    split_texts = (text.partition(". ") for text in documents)
    rows = {
        "documents": [{"text": text} for text in documents],
        "pairs": [{"query": f"{first}.", "positive": answer} for first, _, answer in split_texts if answer],
    }
    for name, texts in rows.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in texts)
        file = out / f"{name}.jsonl"
        if not file.exists() or file.read_text(encoding="utf-8") != text:  # `prepare` resumes on the same file only
            write_whole(file, text)
    return out / "documents.jsonl", out / "pairs.jsonl"


def figures(result: Path) -> dict[str, float]:
    """Return the figures of the only set of a result."""
    (of_set,) = json.loads(result.read_text(encoding="utf-8"))["figures"].values()
    return of_set


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beir", type=Path, required=True, help="a folder with corpus, queries, qrels/{train,test}")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(words)
    beir, out = options.beir.resolve(), options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    documents, pairs = write_text(beir, out)
    spec = {
        "out": str(out / "data"),
        "sources": {"documents": {"kind": "jsonl", "path": str(documents)}},
        "tokenizer": {"vocab_size": 8192},
        "validation_share": 0.02,
    }
    recipe = {"train": [str(beir), str(pairs)], "evaluate": {"test": str(beir)}, **RECIPE}
    for name, tree in (("prepare", spec), ("recipe", recipe)):
        write_whole(out / f"{name}.yaml", yaml.safe_dump(tree, sort_keys=False))
    runs = out / "runs"
    data = (f"data.{part}={out / 'data' / part}" for part in ("train", "validation", "tokenizer"))
    must("prepare", str(out / "prepare.yaml"))
    must("train", str(Path(__file__).with_suffix(".yaml")), f"runs_folder={runs}", *data)
    model = ("--model", str(runs / "masked"), f"runs_folder={runs}")
    must("retrieval", "evaluate", str(beir), *model, "name=before", "pooling=sparse", "max_tokens=128")
    must("retrieval", "train", str(out / "recipe.yaml"), *model, "name=after", *FLOPS)
    print("| SciFact's part | " + " | ".join(SHOWN) + " |")
    for name in ("before", "after"):
        measured = figures(runs / name / "result.json")
        print(f"| {name} | " + " | ".join(f"{measured[each]:.4g}" for each in SHOWN) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
