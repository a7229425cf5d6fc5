"""Train a GLiNER, which finds entities of any named types, on an exported encoder.

    python -m modernbert_train export runs/mine                       # -> runs/mine/hf
    python examples/train_gliner.py runs/mine/hf --train train.conll --dev dev.conll --out my-gliner

Files are CoNLL: a word and its tag (O, B-type, I-type) a line, an empty line between sentences. `creative-work` is read
as "creative work". The gliner library trains and scores; this script adds two things that the library lacks:

- Words keep the space before them. The library passes single words to the tokenizer; a byte-level one would read
  "Angela" as the inside of a word, which the encoder hardly saw.
- Sentences are also queried for types that they lack, each with probability --ask-absent. The library queries a
  sentence without entities for no types, so its model finds entities everywhere.

Defaults are from GLiNER's paper (Zaratiana et al., arXiv 2311.08526) and configs/config_span.yaml. They start from
DeBERTaV3; an encoder of a few million weights needs higher rates, such as --lr 5e-4 --others-lr 1e-3.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

Sentence = dict[str, Any]


def read_conll(file: Path) -> Iterator[Sentence]:
    """Yield sentences in the library's form: `tokenized_text`, and `ner` as [first word, last word, type]."""
    for block in re.split(r"\n\s*\n", file.read_text(encoding="utf-8")):
        rows = [line.split() for line in block.splitlines() if line.strip()]
        if wrong := [row for row in rows if len(row) < 2 or (row[-1] != "O" and row[-1][:2] not in ("B-", "I-"))]:
            raise SystemExit(f"{file}: {' '.join(wrong[0])!r} is not a word with a tag O, B-TYPE or I-TYPE.")
        entities: list[list[Any]] = []
        for position, (*_, tag) in enumerate(rows):
            kind = tag[2:].replace("-", " ").replace("_", " ")
            if tag[:2] == "I-" and entities and entities[-1][1:] == [position - 1, kind]:
                entities[-1][1] = position
            elif tag != "O":
                entities.append([position, position, kind])
        if any(letter.isalnum() for row in rows for letter in row[0]):
            yield {"tokenized_text": [row[0] for row in rows], "ner": entities}


def types_of(sentences: Sequence[Sentence]) -> list[str]:
    return sorted({kind for sentence in sentences for *_, kind in sentence["ner"]})


def add_leading_space(folder: Path) -> None:
    """Make a byte-level tokenizer read each word of a list as in running text; changes tokenizer.json."""
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    step = tokenizer.get("pre_tokenizer") or {}
    steps = step.get("pretokenizers", []) if step.get("type") == "Sequence" else [step]
    byte_levels = [number for number, each in enumerate(steps) if each.get("type") == "ByteLevel"]
    if not byte_levels:  # WordPiece and SentencePiece mark the beginning of a word themselves
        return
    if byte_levels[0] == 0:
        steps[0]["add_prefix_space"] = True
        settings = folder / "tokenizer_config.json"
        about = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
        settings.write_text(json.dumps(about | {"add_prefix_space": True}, indent=2) + "\n", encoding="utf-8")
    else:  # it receives parts of words from another step, and would put a space before each part
        before = [tokenizer["normalizer"]] if tokenizer.get("normalizer") else []
        space = {"type": "Prepend", "prepend": " "}
        tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [*before, space]}
    file.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


@lru_cache(maxsize=1)
def shuffled(size: int, key: str) -> list[int]:
    return random.Random(key).sample(range(size), size)


class Visits:
    """The sentence of each step and its queried types; a function of the seed alone."""

    def __init__(self, sentences: Sequence[Sentence], options: argparse.Namespace) -> None:
        self._sentences, self._types, self._options = sentences, types_of(sentences), options

    def __len__(self) -> int:
        return int(self._options.steps * self._options.batch_size)

    def __getitem__(self, number: int) -> Sentence:
        if not 0 <= number < len(self):
            raise IndexError(number)
        epoch, position = divmod(number, len(self._sentences))
        sentence = self._sentences[shuffled(len(self._sentences), f"{self._options.seed} order {epoch}")[position]]
        draw = random.Random(f"{self._options.seed} types {number}")
        own = types_of([sentence])
        others = [kind for kind in self._types if kind not in own and draw.random() < self._options.ask_absent]
        asked = [*own, *others][: self._options.max_types] or [draw.choice(self._types)]
        return sentence | {"ner_labels": draw.sample(asked, len(asked))}


def build(encoder: Path, options: argparse.Namespace) -> Any:
    """Build a GLiNER on an encoder's folder; its new weights are drawn by the seed."""
    from gliner import GLiNER
    from transformers import set_seed

    set_seed(options.seed)
    about = {"model_name": str(encoder), "span_mode": "markerV0", "words_splitter_type": "whitespace"}
    about |= {"max_width": options.max_width, "max_len": options.max_len, "max_types": options.max_types}
    about |= {"hidden_size": options.hidden_size, "dropout": options.dropout, "subtoken_pooling": "first"}
    return GLiNER.from_config(
        about | {"fine_tune": True, "class_token_index": -1, "vocab_size": -1}, local_files_only=True
    )


def fit(model: Any, visits: Visits, options: argparse.Namespace) -> None:
    """Train in place."""
    from gliner.training import TrainingArguments

    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=scratch,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch_size,
            learning_rate=options.lr,
            others_lr=options.others_lr,
            weight_decay=0.1,
            others_weight_decay=0.01,
            warmup_ratio=0.1,
            lr_scheduler_type="cosine",
            max_grad_norm=10.0,  # the loss is a sum
            focal_loss_alpha=0.75,
            focal_loss_gamma=0.0,
            loss_reduction="sum",
            seed=options.seed,
            use_cpu=options.device == "cpu",
            dataloader_num_workers=0,
            remove_unused_columns=False,
            save_strategy="no",
            report_to="none",
            train_sampling_strategy="sequential",  # Visits has the order
        )
        model.train_model(visits, None, training_args=arguments)


def measure(
    model: Any, sentences: Sequence[Sentence], trained_types: Sequence[str], threshold: float
) -> dict[str, float]:
    """Return F1 of exact spans with their types, for types seen in training and for types only in this file."""
    figures = {}
    for name, kinds in (
        ("f1", trained_types),
        ("zero_shot_f1", [kind for kind in types_of(sentences) if kind not in trained_types]),
    ):
        if kinds:
            asked = [each | {"ner": [entity for entity in each["ner"] if entity[2] in kinds]} for each in sentences]
            _, figures[name] = model.evaluate(asked, flat_ner=True, threshold=threshold, entity_types=list(kinds))
    return figures


def main(words: Sequence[str] | None = None) -> None:
    """Train, measure and store."""
    parser = argparse.ArgumentParser(description="Train a GLiNER on an exported encoder.")
    parser.add_argument("model", type=Path, help="folder that `export` wrote")
    parser.add_argument("--train", type=Path, required=True, metavar="CONLL")
    parser.add_argument("--dev", type=Path, required=True, metavar="CONLL")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch-size", type=int, default=8, help="sentences")
    parser.add_argument("--lr", type=float, default=1e-5, help="of the encoder")
    parser.add_argument("--others-lr", type=float, default=5e-5, help="of all new weights")
    parser.add_argument("--ask-absent", type=float, default=0.5, help="probability of a type that a sentence lacks")
    parser.add_argument("--max-types", type=int, default=25, help="queried in one sentence")
    parser.add_argument("--max-width", type=int, default=12, help="words of an entity")
    parser.add_argument("--max-len", type=int, default=384, help="words of a sentence")
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--dropout", type=float, default=0.4)
    parser.add_argument("--threshold", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=1618)
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    options = parser.parse_args(words)
    train, dev = (list(read_conll(file)) for file in (options.train, options.dev))
    if not types_of(train):
        raise SystemExit(f"--train {options.train}: no entity to learn from. Name a file with tags B-TYPE and I-TYPE.")
    with tempfile.TemporaryDirectory() as folder:
        encoder = Path(shutil.copytree(options.model, Path(folder) / "encoder"))
        add_leading_space(encoder)
        model = build(encoder, options)
        fit(model, Visits(train, options), options)
    figures = measure(model, dev, types_of(train), options.threshold)
    model.config.model_name = model.config.encoder_config._name_or_path = options.model.name  # no path of this machine
    model.save_pretrained(options.out, safe_serialization=True)
    (options.out / "result.json").write_text(json.dumps(figures | vars(options), indent=2, default=str) + "\n")
    print(", ".join(f"{name} {value:.4f}" for name, value in figures.items()), "->", options.out)


if __name__ == "__main__":
    main()
