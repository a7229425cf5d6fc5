"""Open shards of others."""

from __future__ import annotations

from pathlib import Path

from modernbert_train.config.schema import DataConfig
from modernbert_train.data.facts import read_folder
from modernbert_train.data.mds import TokenShards
from modernbert_train.data.open_shards import open_shards
from modernbert_train.vocabulary import read_vocabulary


def opened(folder: Path | str, tokenizer: str) -> TokenShards:
    data = DataConfig(train=str(folder), tokenizer=tokenizer)
    return open_shards(read_folder("data.train", str(folder), data), data, read_vocabulary(tokenizer))
