"""The order of documents in an epoch: a keyed shuffle that still reads shards in blocks.

Shards are permuted, taken in blocks of a few, and the documents of a block are permuted among themselves. So a reader
holds one block of shards at a time, and any position of any epoch can be found without walking there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from modernbert_train.keyed import derive, permutation

_SHARDS, _DOCUMENTS = 1, 2


class DocumentOrder:
    """The shuffled documents of every epoch.

    Args:
        shard_documents: number of documents in each shard; documents are numbered through all shards in order.
        block_shards: shards shuffled together.
        seed: the run's seed.
    """

    def __init__(self, shard_documents: Sequence[int], block_shards: int, seed: int) -> None:
        self._sizes = np.asarray(shard_documents, dtype=np.int64)
        self._first = np.concatenate([[0], np.cumsum(self._sizes)])
        self._block_shards = block_shards
        self._seed = seed
        self.num_documents = int(self._first[-1])

    def documents_from(self, epoch: int, index: int) -> NDArray[np.int64]:
        """Document numbers from a position to the end of its block.

        Args:
            epoch: from 0.
            index: documents already taken in this epoch; below num_documents.

        Returns:
            int64 document numbers, at least one.
        """
        shards = permutation(len(self._sizes), derive(self._seed, _SHARDS, epoch))
        ends = np.cumsum(self._sizes[shards])
        block_ends = ends[self._block_shards - 1 :: self._block_shards]
        if len(block_ends) == 0 or block_ends[-1] != ends[-1]:
            block_ends = np.append(block_ends, ends[-1])
        block = int(np.searchsorted(block_ends, index, side="right"))
        start = int(block_ends[block - 1]) if block else 0
        members = shards[block * self._block_shards : (block + 1) * self._block_shards]
        documents = np.concatenate([np.arange(self._first[s], self._first[s + 1]) for s in members])
        shuffled = documents[permutation(len(documents), derive(self._seed, _DOCUMENTS, epoch, block))]
        return shuffled[index - start :]
