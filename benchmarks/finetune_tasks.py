"""Small tasks of every kind for benchmarks/finetune.py, out of public files: so many texts of each, drawn by a key.

Under --tasks: glue/QNLI/dev.tsv, glue/STS-B-open/{train,dev}.tsv, other_tasks/banking77_{train,test}.csv,
other_tasks/wnut17_{train,dev}.conll, text/books_chapters.jsonl.zst. Three tasks are made here: from which of six books
a sentence is, learned from nine in ten of the chapters and told of the others; which of its words were written with a
capital, from small letters; and which kinds of names a sentence of WNUT-17 has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.judged import write_tasks
from data_prep.read.lines import open_unpacked
from modernbert_train.core.files import write_whole
from modernbert_train.core.keyed_random import derive, permutation
from modernbert_train.evaluate.finetune.examples import Example
from modernbert_train.evaluate.finetune.read import read_splits
from modernbert_train.evaluate.finetune.task import read_task

LEFT_OUT = ("wnli",)  # made so that nobody does better than guessing
TEST = 300  # texts to measure on
# to learn from; so that a turn takes about a minute
TRAIN = {"banking77": 800, "stsb": 600, "qnli": 300, "books": 500, "names": 300, "capitals": 400, "wnut17": 600}
BOOKS = ("Emma", "Dracula", "Middlemarch", "Great Expectations", "Main Street", "The Moonstone")
# of every task, not tuned
TRAINING: dict[str, Any] = {"lr": 1e-3, "weight_decay": 1e-5, "batch_texts": 32, "max_tokens": 128}
EPOCHS = {"wnut17": 5, "names": 4}  # of others 3
METRICS = {"stsb": "pearson"}  # of others the usual one
_SENTENCE = re.compile(r"(?<=[.!?])\s+")


def small_tasks(folder: Path, out: Path) -> dict[str, Path]:
    """A YAML for each task, by its name, written with its texts."""
    (out / "whole").mkdir(parents=True, exist_ok=True)
    texts: dict[str, tuple[str, Mapping[str, Sequence[Example]]]] = {}
    books = folder / "text/books_chapters.jsonl.zst"
    if books.is_file():
        sentences = _sentences(books)
        texts["books"] = "single-label", sentences
        texts["capitals"] = "tokens", {name: _capitals(found) for name, found in sentences.items()}
    for file in map(Path, write_tasks(folder.absolute(), out / "whole")):
        if file.stem in LEFT_OUT:
            continue
        task, _ = read_task(str(file), [])
        texts[file.stem] = task.kind, {name: split.examples for name, split in read_splits(task).items()}
    if "wnut17" in texts:
        texts["names"] = "multi-label", {name: _kinds(found) for name, found in texts["wnut17"][1].items()}
    found = {}
    for name, (kind, splits) in texts.items():
        most = {"train": TRAIN[name], "test": TEST}
        drawn = {split: _drawn(examples, most[split]) for split, examples in splits.items()}
        found[name] = _write(name, kind, drawn, out)
    return found


def _drawn(examples: Sequence[Example], most: int) -> list[Example]:
    order = permutation(len(examples), derive(1, most))
    return [examples[number] for number in sorted(order[:most])]


def _kinds(examples: Sequence[Example]) -> list[Example]:
    """Which kinds of names a sentence has; of those with none a tenth, by their place."""
    found = []
    for number, example in enumerate(examples):
        kinds = sorted({tag.partition("-")[2] for tag in example.label} - {""})
        if kinds or number % 10 == 0:
            found.append(Example(example.place, (" ".join(example.texts),), kinds))
    return found


def _capitals(examples: Sequence[Example]) -> list[Example]:
    """Words in small letters; those that had a capital, the first of a sentence aside, are names."""
    found = []
    for example in examples:
        words = example.texts[0].split()
        names = [number > 0 and word.lstrip("\"'([")[:1].isupper() for number, word in enumerate(words)]
        tags = [
            ("I-NAME" if number and names[number - 1] else "B-NAME") if name else "O"
            for number, name in enumerate(names)
        ]
        found.append(Example("", tuple(word.lower() for word in words), tags))
    return found


def _sentences(file: Path) -> dict[str, list[Example]]:
    found: dict[str, list[Example]] = {"train": [], "test": []}
    with open_unpacked(file) as lines:
        for number, line in enumerate(lines):
            document = json.loads(line)
            if document["book"] in BOOKS:
                split = "test" if number % 10 == 0 else "train"
                some = [text for text in _SENTENCE.split(" ".join(document["text"].split())) if 60 <= len(text) <= 200]
                found[split] += [Example("", (text,), document["book"]) for text in some]
    return found


def _write(name: str, kind: str, splits: Mapping[str, Sequence[Example]], out: Path) -> Path:
    columns = ["text"] if kind == "tokens" else [f"text{n}" for n, _ in enumerate(splits["train"][0].texts, start=1)]
    for split, examples in splits.items():
        file = out / f"{name}_{split}.{'conll' if kind == 'tokens' else 'jsonl'}"
        if kind == "tokens":
            told = ("".join(f"{word}\t{tag}\n" for word, tag in zip(e.texts, e.label, strict=True)) for e in examples)
            write_whole(file, "\n".join(told))
        else:
            rows = ({**dict(zip(columns, e.texts, strict=True)), "label": e.label} for e in examples)
            write_whole(file, "".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "kind": kind,
        "train": str(out / f"{name}_train{file.suffix}"),
        "validation": {"test": str(out / f"{name}_test{file.suffix}")},
        "text_columns": columns,
        "epochs": EPOCHS.get(name, 3),
        "metrics": [METRICS[name]] if name in METRICS else [],
        **TRAINING,
        **({} if kind == "tokens" else {"pooling": "mean"}),
    }
    write_whole(out / f"{name}.yaml", json.dumps(task, indent=1))
    return out / f"{name}.yaml"
