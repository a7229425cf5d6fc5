"""Fetch shards of a remote folder while the block before them is being read.

The order of an epoch is known from its start, so the next block is too. Prefetching only saves time: on a failure the
reader tries again when it needs the shard, and reports the error.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from random import Random

import numpy as np
from numpy.typing import NDArray

from modernbert_train.data.mds import TokenShards
from modernbert_train.data.shuffle import ShuffledChunks
from modernbert_train.errors import RunError

_THREADS = 4  # shards fetched at once by each rank; a store's single stream is slower than a network card


class PrefetchedChunks(ShuffledChunks):
    """Chunks of remote shards: reading a block fetches its shards in the background, then the next block's.

    Args:
        shards: the remote shards.
        block_shards: shards shuffled together.
        seed: the run's seed.
        next_block: fetch the next block too; only if the cache has room for two.
    """

    def __init__(self, shards: TokenShards, block_shards: int, seed: int, *, next_block: bool) -> None:
        super().__init__(shards.shard_documents, shards.lengths, block_shards, seed, shards.tokens)
        self._shards = shards
        self._next_block = next_block
        self._latest = 0  # number of requested blocks

    def block(self, epoch: int, block: int, chunk_tokens: int) -> NDArray[np.int64]:
        """Return a block like ShuffledChunks; returns at once, before shards are fetched."""
        layout = super().block(epoch, block, chunk_tokens)
        self._latest += 1
        threading.Thread(
            target=self._fetch, args=(self._latest, layout, epoch, block, chunk_tokens), daemon=True
        ).start()
        return layout

    def _fetch(self, mine: int, layout: NDArray[np.int64], epoch: int, block: int, chunk_tokens: int) -> None:
        self._fetch_all(self._shards_in(layout), mine)
        if self._next_block and mine == self._latest:
            following = (epoch, block + 1) if block + 1 < self.num_blocks else (epoch + 1, 0)
            self._fetch_all(self._shards_in(super().block(*following, chunk_tokens)), mine)

    def _shards_in(self, layout: NDArray[np.int64]) -> deque[int]:
        """Return the block's shards in a random order, so that the ranks of a machine fetch different ones."""
        shards = np.unique(np.searchsorted(self._first, layout[:, 0], side="right") - 1).tolist()
        Random().shuffle(shards)
        return deque(shards)

    def _fetch_all(self, shards: deque[int], generation: int) -> None:
        threads = [
            threading.Thread(target=self._fetch_each, args=(shards, generation), daemon=True) for _ in range(_THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _fetch_each(self, shards: deque[int], generation: int) -> None:
        while shards and generation == self._latest:  # a later block fetches its own shards
            with contextlib.suppress(RunError, IndexError):  # another thread took the last
                self._shards.fetch_ahead(shards.popleft())
