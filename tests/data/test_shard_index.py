"""index.json of a folder of shards, which one process of a machine reads for all."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

from modernbert_train.data.shard_index import ShardIndex


def test_what_was_read_goes_to_another_process_and_says_the_same(tiny_data: Path) -> None:
    """If entries stood elsewhere there, a rank would read other shards than the rest."""
    index = ShardIndex(tiny_data / "train" / "index.json")
    there: ShardIndex = pickle.loads(pickle.dumps(index))
    shards = json.loads((tiny_data / "train" / "index.json").read_text())["shards"]
    assert list(there) == list(index) == shards
    assert there.documents.tolist() == [each["samples"] for each in shards]
    assert (there.columns, there.below) == (index.columns, index.below)
    assert there.bytes.tolist() == index.bytes.tolist()
