"""The order of an epoch: shards shuffled, then everything within blocks of a few shards, keyed and without history.

What is shuffled within a block is not documents but their pieces, the stretches that become sequences. A long document
would otherwise fill batch after batch on its own. A reader holds one block of shards at a time, and any position of
any epoch is found in the time it takes to lay out one block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from modernbert_train.keyed import derive, permutation

_SHARDS, _PIECES = 1, 2


class ShuffledPieces:
    """The pieces of every epoch, in order.

    Args:
        shard_documents: number of documents in each shard; documents are numbered through all shards in order.
        lengths: tokens of each document.
        block_shards: shards shuffled together.
        seed: the run's seed.
    """

    def __init__(
        self, shard_documents: Sequence[int], lengths: NDArray[np.integer], block_shards: int, seed: int
    ) -> None:
        self._first = np.concatenate([[0], np.cumsum(np.asarray(shard_documents, dtype=np.int64))])
        self._lengths = lengths
        self._block_shards = block_shards
        self._seed = seed
        self.num_tokens = int(np.sum(lengths, dtype=np.int64))
        self.num_blocks = -(-len(shard_documents) // block_shards)

    def block(self, epoch: int, block: int, piece_tokens: int) -> NDArray[np.int64]:
        """Lay out one block.

        Args:
            epoch: from 0.
            block: from 0 to num_blocks - 1.
            piece_tokens: longest piece; longer documents are cut into pieces of this length and a rest.

        Returns:
            int64 [pieces, 3]: document, first token, number of tokens; every token of the block's documents once.
        """
        shards = permutation(len(self._first) - 1, derive(self._seed, _SHARDS, epoch))
        members = shards[block * self._block_shards : (block + 1) * self._block_shards]
        documents = np.concatenate([np.arange(self._first[s], self._first[s + 1]) for s in members])
        lengths = self._lengths[documents].astype(np.int64)
        counts = -(-lengths // piece_tokens)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = within * piece_tokens
        sizes = np.minimum(np.repeat(lengths, counts) - starts, piece_tokens)
        pieces = np.stack([np.repeat(documents, counts), starts, sizes], axis=1)
        return pieces[permutation(len(pieces), derive(self._seed, _PIECES, epoch, block, piece_tokens))]
