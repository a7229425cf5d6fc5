"""Fixtures: a tokenizer, tiny models and labelled files, with generated words that determine the class."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.finetuning import Tuning
from tests.support.front_door import Cli
from tests.support.labelled import BAD, CONFIGS, GOOD, PLAIN, WriteTask, export_masked_lm, sentences, write_tsv
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
    folder = tmp_path_factory.mktemp("models")
    # an init_std that is large enough to learn
    return {
        name: export_masked_lm(replace(config, init_std=0.08), tokenizer, folder / name)
        for name, config in CONFIGS.items()
    }


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


@pytest.fixture
def tuning(tmp_path: Path, models: dict[str, Path], write_task: WriteTask, cli: Cli) -> Tuning:
    return Tuning(tmp_path, models, write_task, cli)


Hub = Callable[..., list[tuple[str | None, ...]]]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Return a function that lets the hub have these rows, in each split without some columns of them; it returns the
    data set, subset and split of each request."""
    import datasets

    def has(rows: Sequence[Any], features: dict[str, Any], **without: str) -> list[tuple[str | None, ...]]:
        asked: list[tuple[str | None, ...]] = []

        def load(data: str, subset: str | None, split: str) -> Any:
            asked.append((data, subset, split))
            found = datasets.Dataset.from_list(list(rows), features=datasets.Features(features))
            return found.remove_columns(without[split]) if split in without else found

        monkeypatch.setattr(datasets, "load_dataset", load)
        return asked

    return has


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
