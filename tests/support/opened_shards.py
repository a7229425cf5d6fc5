"""Open shards as a run does, and read them."""

from __future__ import annotations

from modernbert_train.config.schema import DataConfig
from modernbert_train.data.facts import read_folder
from modernbert_train.data.mds import TokenShards
from modernbert_train.data.open_shards import open_shards
from modernbert_train.vocabulary import read_vocabulary


def opened(data: DataConfig) -> TokenShards:
    return open_shards(read_folder("data.train", str(data.train), data), data, read_vocabulary(data.tokenizer))


def read_all(shards: TokenShards) -> list[list[int]]:
    return [shards.read(number).tolist() for number in range(len(shards.lengths))]
