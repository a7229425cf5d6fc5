"""A small retrieval data set, and encoders for it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from modernbert_train.config.schema import BertConfig, MaskedLmConfig, ModelConfig, ModernBertConfig
from modernbert_train.models.build import build_model
from modernbert_train.models.init import initialize
from modernbert_train.weights.hf_folder import export

SIZE = {"vocab_size": 512, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "init_std": 0.4}
MODERNBERT = ModernBertConfig(**SIZE, num_layers=2, local_attention=16, attention_out_dropout=0.0)
BERT = BertConfig(**SIZE, num_layers=2, max_positions=64, dropout=0.0)
LONGEST = 64
_draw = random.Random(7)
WORDS = ["".join(_draw.choices("aeiou", k=1)) + "".join(_draw.choices("bdklmnrst", k=2)) for _ in range(60)]
TWINS = {word: "".join(_draw.choices("xzvwyq", k=3)) for word in WORDS}


def words_about(seed: int, size: int) -> tuple[str, str]:
    """Return a query, and a text with the synonyms of its words among others."""
    draw = random.Random(seed)
    words = draw.sample(WORDS, size)
    text = [TWINS[word] for word in words] + draw.choices(list(TWINS.values()), k=2)
    draw.shuffle(text)
    return " ".join(words), " ".join(text)


def make_encoder(out: Path, tokenizer: Path, config: ModelConfig = MODERNBERT, init_std: float = 0.4) -> Path:
    config = replace(config, init_std=init_std)
    model = build_model(config, MaskedLmConfig())
    initialize(model, config, 3)
    state = {key: value for key, value in model.state_dict().items() if key != "decoder.weight"}
    export(state, config, max_tokens=LONGEST, tokenizer_folder=tokenizer, out=out, card="")
    return out


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
