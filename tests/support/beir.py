"""A small retrieval data set, and encoders for it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from modernbert_train.config.schema import ModelConfig, ModernBertConfig
from tests.support.exported import export_random
from tests.support.labelled import BERT as BERT
from tests.support.labelled import SIZE
from tests.support.pairs import TWINS, WORDS

MODERNBERT = ModernBertConfig(**SIZE, num_layers=2, local_attention=16, attention_out_dropout=0.0)
LONGEST = 64


def words_about(seed: int, size: int) -> tuple[str, str]:
    """Return a query, and a text with the synonyms of its words among others."""
    draw = random.Random(seed)
    words = draw.sample(WORDS, size)
    text = [TWINS[word] for word in words] + draw.choices(list(TWINS.values()), k=2)
    draw.shuffle(text)
    return " ".join(words), " ".join(text)


def make_encoder(out: Path, tokenizer: Path, config: ModelConfig = MODERNBERT, init_std: float = 0.4) -> Path:
    return export_random(replace(config, init_std=init_std), tokenizer, out, max_tokens=LONGEST)


def write_lines(file: Path, entries: Iterable[Mapping[str, object]]) -> Path:
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return file


WriteBeir = Callable[..., Path]


def recipe(folder: Path, beir: Path, **keys: Any) -> str:
    """Write a recipe of `retrieval train` for a BEIR folder, which is also measured."""
    settings = {
        "train": [str(beir)], "evaluate": {"toy": str(beir)}, "runs_folder": str(folder / "runs"), "device": "cpu",
        "batch_size": 20, "epochs": 5, "lr": 5e-3, "warmup": 0.1,
    }  # fmt: skip
    file = folder / "toy.yaml"
    file.write_text(json.dumps(settings | keys), encoding="utf-8")
    return str(file)


def result_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))
