"""The position of each stream of a mixture after a batch: before a chunk.

The queue reads the next chunk of every stream when it chooses one, so an exhausted block is left for the next, which is
laid out for the current rows. If it were laid out later, for the rows of a later phase, a run would continue with other
batches than under earlier versions.
"""

from __future__ import annotations

import numpy as np

from modernbert_train.clock import Clock
from modernbert_train.config.schema import StreamConfig
from modernbert_train.data.planner import BatchPlanner
from modernbert_train.data.shuffle import ShuffledChunks
from tests.support.planned import run


def test_a_block_that_is_given_out_is_left_for_the_next() -> None:
    lengths = np.array([60, 40, 100, 150, 20, 31, 7, 90, 64], np.uint32)
    streams = {name: StreamConfig(path="", proportion=0.5) for name in "ab"}
    config = run(64, 256, 32, train=None, streams=streams, shuffle_block_shards=1)
    chunks = {name: ShuffledChunks([3, 2, 4], lengths, 1, seed) for seed, name in enumerate("ab")}
    planner, begun = BatchPlanner(config.data, Clock.of(config), chunks), 0
    for _ in planner:
        for name, place in planner.state_dict()["streams"].items():
            block = chunks[name].block(place["epoch"], place["block"], place["laid_out_for"])
            assert place["laid_out_for"] and place["taken"] < len(block), place
            begun += place["taken"] == 0 == place["offset"]
    assert begun > 3  # batches that ended with a block, so that there was something to see
