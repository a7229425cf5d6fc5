"""Fixtures: a tokenizer, tiny models and labelled files, with generated words that determine the class."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from modernbert_train.config.schema import (
    MaskedLmConfig,
)
from modernbert_train.models.build import build_model
from modernbert_train.models.init import initialize
from modernbert_train.weights.hf_folder import export
from tests.support.labelled import BAD, CONFIGS, GOOD, PLAIN, WriteTask, sentences, write_tsv
from tests.support.make_shards import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(4)
    texts = [" ".join(draw.choices((*GOOD, *BAD, *PLAIN), k=100)) for _ in range(20)]
    texts += ["".join(draw.choices("abdeiklmnorstu ", k=400)) for _ in range(60)]
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer", texts)


@pytest.fixture(scope="session")
def models(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write a folder of each architecture, with random weights."""
    made = {}
    for name, config in CONFIGS.items():
        config = replace(config, init_std=0.08)  # large enough to learn
        model = build_model(config, MaskedLmConfig())
        initialize(model, config, 3)
        out = made[name] = tmp_path_factory.mktemp("models") / name
        state = {key: value for key, value in model.state_dict().items() if key != "decoder.weight"}
        export(state, config, max_tokens=64, tokenizer_folder=tokenizer, out=out, card="")
    return made


@pytest.fixture
def write_task(tmp_path: Path) -> WriteTask:
    """Return a function that writes a task of two classes with other keys, and returns its YAML."""
    write_tsv(tmp_path / "train.tsv", ("text", "label"), sentences(96, 1))
    write_tsv(tmp_path / "dev.tsv", ("text", "label"), sentences(40, 2))

    def write(**keys: object) -> Path:
        task = {"kind": "single-label", "train": f"{tmp_path}/train.tsv", "validation": {"dev": f"{tmp_path}/dev.tsv"}}
        settings = {"lr": 3e-3, "epochs": 3, "batch_texts": 16, "max_tokens": 32}
        file = tmp_path / "tone.yaml"
        file.write_text(json.dumps(task | settings | keys), encoding="utf-8")  # JSON is YAML
        return file

    return write


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
