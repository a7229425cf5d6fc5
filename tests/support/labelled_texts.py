"""Labelled texts as they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.data.dataset_card import read_card
from modernbert_train.data.mds import TokenShards
from modernbert_train.vocabulary import read_vocabulary


def task_of(folder: Path, **keys: Any) -> TaskConfig:
    about = {"kind": "single-label", "train": f"{folder}/train.tsv", "validation": {"dev": f"{folder}/dev.tsv"}}
    return TaskConfig(**about | keys)


def documents(folder: Path, tokenizer: Path) -> tuple[list[list[int]], TokenShards]:
    card = read_card(folder)
    shards = TokenShards(folder, card.column, read_vocabulary(tokenizer).num_entries, 2, card=card)
    return [shards.read(number).tolist() for number in range(card.documents)], shards


def decoded(tokenizer: Path, ids: list[int]) -> str:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(f"{tokenizer}/tokenizer.json").decode(ids, skip_special_tokens=False)
