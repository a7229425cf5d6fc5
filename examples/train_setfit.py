"""Train a SetFit, a classifier that learns from a few texts of each class, on an exported encoder.

    python -m modernbert_train export runs/mine                       # -> runs/mine/hf
    python examples/train_setfit.py runs/mine/hf --train train.csv --test test.csv --out my-setfit

For each class --shots texts are drawn. The setfit library trains the encoder until the cosine of the means of two texts
is 1 within a class and 0 between classes, and fits a logistic regression on the means. Figures with the prefix
`frozen_` are for the same regression on the original encoder.

The regression is stored as tensors, head.safetensors, where the library would write a pickle, which runs code when it
is loaded. So `SetFitModel.from_pretrained` does not find it; `load` in this file does.

Defaults are from the paper's script (Tunstall et al., arXiv 2209.11055) and the library. The library pairs the drawn
texts by a fixed seed of 42; --seed varies the draw, the order and dropout.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

HEAD, LABELS = "head.safetensors", "config_setfit.json"  # the second is the library's
MAX_TEXTS = 3_000  # the library first lists all pairs, 4.5 million of this many texts


class Example(NamedTuple):
    """A text and its class."""

    text: str
    label: str


def read_examples(file: Path, text_column: str, label_column: str) -> list[Example]:
    """Read texts that contain a letter, and their classes."""
    with file.open(encoding="utf-8", newline="") as opened:
        rows = csv.DictReader(opened)
        if missing := {text_column, label_column} - {*(rows.fieldnames or ())}:
            raise SystemExit(f"{file}: lacks a column {missing.pop()!r}. Set --text-column and --label-column.")
        read = [Example(row[text_column] or "", row[label_column] or "") for row in rows]
    if not all(each.label for each in read):
        raise SystemExit(f"{file}: a row lacks a {label_column}. Complete it, or remove it.")
    return [each for each in read if any(letter.isalnum() for letter in each.text)]


def draw(examples: Sequence[Example], shots: int, seed: int) -> list[Example]:
    """Draw `shots` texts of each class, or all if there are fewer; fewer shots are a subset of more."""
    drawn = []
    for label in sorted({each.label for each in examples}):
        of_class = [each for each in examples if each.label == label]
        drawn += random.Random(f"{seed} {label}").sample(of_class, len(of_class))[:shots]
    return drawn


def build(encoder: Path, classes: Sequence[str], max_tokens: int | None = None, seed: int = 0) -> Any:
    """Build a SetFit model from a folder: the mean of the encoder's states, and a logistic regression."""
    from sentence_transformers import SentenceTransformer
    from setfit import SetFitModel
    from sklearn.linear_model import LogisticRegression
    from transformers import set_seed

    set_seed(seed)
    body = SentenceTransformer(str(encoder), local_files_only=True, trust_remote_code=False)
    if max_tokens is not None:
        body.max_seq_length = min(max_tokens, body.max_seq_length or max_tokens)
    return SetFitModel(body, LogisticRegression(), labels=list(classes))


def accuracy(predicted: Any, labels: Any) -> dict[str, float]:
    """Return the share of correctly classified texts."""
    import numpy as np

    return {"accuracy": float(np.mean(np.asarray(predicted) == np.asarray(labels)))}


def fit(model: Any, texts: Sequence[str], numbers: Sequence[int], options: argparse.Namespace) -> None:
    """Train encoder and regression in place."""
    from datasets import Dataset
    from setfit import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=scratch,
            batch_size=options.batch_size,
            num_epochs=1,
            max_steps=options.steps or -1,
            num_iterations=options.num_iterations,
            body_learning_rate=options.lr,
            seed=options.seed,
            report_to="none",  # by default, every installed logger
            save_strategy="no",
        )
        data = Dataset.from_dict({"text": list(texts), "label": list(numbers)})
        # a metric given by name would be downloaded from the hub
        Trainer(model=model, args=arguments, train_dataset=data, metric=accuracy).train()


def measure(model: Any, examples: Sequence[Example], classes: Sequence[str]) -> dict[str, float]:
    """Return the accuracy; texts of classes unseen in training count as wrong."""
    predicted = model.predict([each.text for each in examples], use_labels=False, as_numpy=True)
    return accuracy(predicted, [classes.index(each.label) if each.label in classes else -1 for each in examples])


def save(model: Any, folder: Path) -> None:
    """Write the encoder for sentence-transformers, the names of classes, and the regression as tensors."""
    from safetensors.numpy import save_file

    model.model_body.save(str(folder), create_model_card=False)
    about = {"normalize_embeddings": model.normalize_embeddings, "labels": model.labels}
    (folder / LABELS).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    head = model.model_head
    save_file({"coef": head.coef_, "intercept": head.intercept_, "classes": head.classes_}, folder / HEAD)


def load(folder: Path) -> Any:
    """Load a stored model as the library's class, without running code from it."""
    from safetensors.numpy import load_file

    tensors = load_file(folder / HEAD)
    labels = json.loads((folder / LABELS).read_text(encoding="utf-8"))["labels"]
    model = build(folder, labels)
    head = model.model_head
    head.coef_, head.intercept_, head.classes_ = tensors["coef"], tensors["intercept"], tensors["classes"]
    head.n_features_in_ = head.coef_.shape[1]
    return model


def main(words: Sequence[str] | None = None) -> None:
    """Train, compare with the frozen encoder, and store."""
    parser = argparse.ArgumentParser(description="Train a SetFit on an exported encoder.")
    parser.add_argument("model", type=Path, help="folder that `export` wrote")
    parser.add_argument("--train", type=Path, required=True, metavar="CSV", help="texts to draw from")
    parser.add_argument("--test", type=Path, required=True, metavar="CSV")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--text-column", default="text")
    parser.add_argument("--label-column", default="label")
    parser.add_argument("--shots", type=int, default=8, help="texts of each class")
    parser.add_argument("--num-iterations", type=int, default=20, help="pairs of one class and of two for each text")
    parser.add_argument("--steps", type=int, help="end training earlier")
    parser.add_argument("--batch-size", type=int, default=16, help="pairs")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--max-tokens", type=int, default=256, help="longer texts are cut")
    parser.add_argument("--seed", type=int, default=1618)
    options = parser.parse_args(words)
    train, test = (
        read_examples(file, options.text_column, options.label_column) for file in (options.train, options.test)
    )
    classes = sorted({each.label for each in train})
    drawn = draw(train, options.shots, options.seed)
    if len(classes) < 2 or len(drawn) > MAX_TEXTS:
        raise SystemExit(
            f"--shots {options.shots}: {len(drawn):,} texts of {len(classes)} classes were drawn. At least "
            f"2 classes are needed, and {MAX_TEXTS:,} texts are the most that the library can pair."
        )
    texts, numbers = [each.text for each in drawn], [classes.index(each.label) for each in drawn]
    model = build(options.model, classes, options.max_tokens, options.seed)
    model.fit(texts, numbers, 1)  # the regression alone
    frozen = measure(model, test, classes)
    fit(model, texts, numbers, options)
    figures = measure(model, test, classes) | {f"frozen_{name}": value for name, value in frozen.items()}
    save(model, options.out)
    (options.out / "result.json").write_text(json.dumps(figures | vars(options), indent=2, default=str) + "\n")
    print(", ".join(f"{name} {value:.4f}" for name, value in figures.items()), "->", options.out)


if __name__ == "__main__":
    main()
