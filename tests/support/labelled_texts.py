"""Labelled texts as they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.data.dataset_card import read_card
from modernbert_train.data.mds import TokenShards
from modernbert_train.evaluate.finetune.shards import Prepared, prepare
from modernbert_train.vocabulary import read_vocabulary


def task_of(folder: Path, **keys: Any) -> TaskConfig:
    about = {"kind": "single-label", "train": f"{folder}/train.tsv", "validation": {"dev": f"{folder}/dev.tsv"}}
    return TaskConfig(**about | keys)


def prepared_of(folder: Path, tokenizer: Path, most: int = 32, **keys: Any) -> Prepared:
    """Prepare a task for texts of up to `most` tokens, in the folder of a run."""
    return prepare(task_of(folder, **keys), tokenizer, most, folder / "run" / "task")


def documents(folder: Path, tokenizer: Path) -> list[list[int]]:
    shards, number = _opened(folder, tokenizer)
    return [shards.read(document).tolist() for document in range(number)]


def labels_in(folder: Path, tokenizer: Path) -> list[list[Any]]:
    """Return the labels of each document."""
    shards, number = _opened(folder, tokenizer)
    assert shards.labels is not None
    return [shards.labels[document].tolist() for document in range(number)]


def _opened(folder: Path, tokenizer: Path) -> tuple[TokenShards, int]:
    card = read_card(folder)
    return TokenShards(folder, card.column, read_vocabulary(tokenizer).num_entries, 2, card=card), card.documents


def decoded(tokenizer: Path, ids: list[int]) -> str:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(f"{tokenizer}/tokenizer.json").decode(ids, skip_special_tokens=False)
