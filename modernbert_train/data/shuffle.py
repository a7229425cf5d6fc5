"""The order of an epoch: shards shuffled, then everything within blocks of a few shards, keyed and without history.

What is shuffled within a block is not documents but their pieces, the stretches that become sequences. A long document
would otherwise fill batch after batch on its own. A reader holds one block of shards at a time, and any position of
any epoch is found in the time it takes to lay out one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import repeat
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from modernbert_train.data.packing import Piece
from modernbert_train.keyed import derive, permutation
from modernbert_train.read_json import Count

_SHARDS, _PIECES = 1, 2
_SLICE = 4096  # pieces taken from a block's layout at a time
_as_piece = partial(tuple.__new__, Piece)  # Piece(*values), three times as fast


class ShuffledPieces:
    """The pieces of every epoch, in order.

    Args:
        shard_documents: number of documents in each shard; documents are numbered through all shards in order.
        lengths: tokens of each document.
        block_shards: shards shuffled together.
        seed: the stream's seed.

    Attributes:
        num_documents, num_tokens, num_blocks: of one epoch.
    """

    def __init__(
        self, shard_documents: Sequence[int], lengths: NDArray[np.integer], block_shards: int, seed: int
    ) -> None:
        self._first = np.concatenate([[0], np.cumsum(np.asarray(shard_documents, dtype=np.int64))])
        self._lengths = lengths
        self._block_shards = block_shards
        self._seed = seed
        self.num_documents = len(lengths)
        self.num_tokens = int(np.sum(lengths, dtype=np.int64))
        self.num_blocks = -(-len(shard_documents) // block_shards)

    def length_of(self, document: int) -> int:
        """Tokens of a document."""
        return int(self._lengths[document])

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


class CursorState(TypedDict):
    """A place in a stream as JSON; see `PieceCursor`."""

    epoch: Count
    block: Count
    laid_out_for: Count
    taken: Count
    offset: Count


class PieceCursor:
    """A place in the endless sequence of a stream's pieces, epoch after epoch; its state is a few numbers.

    A block is laid out for the longest piece allowed when it is begun. Where shorter ones are asked for before its end,
    the rest of its pieces is cut as it is given out, so that another row length loses and repeats nothing.

    Args:
        pieces: of the stream.
        first_document: number of the stream's first document among those of all streams.
    """

    def __init__(self, pieces: ShuffledPieces, first_document: int) -> None:
        self._pieces = pieces
        self._first_document = first_document
        self._most = 0  # longest piece allowed now
        self._begin(0)

    def _begin(self, epoch: int, block: int = 0) -> None:
        self.epoch, self._block = epoch, block
        self._laid_out_for = 0  # longest piece in the block; 0: not laid out yet
        self._taken = 0  # pieces of the block given out whole
        self._offset = 0  # tokens given out of the piece after these
        self._forget_layout()

    def _forget_layout(self) -> None:
        self._layout: NDArray[np.int64] | None = None
        self._next: list[Piece] = []  # a slice of the layout, last first

    def allow(self, piece_tokens: int) -> None:
        """Give out pieces of at most so many tokens from now on."""
        self._most = piece_tokens

    def next_size(self) -> tuple[int, int]:
        """Size of the piece that `take` will give: its tokens, and 1 if a document begins in it, else 0."""
        while not self._next:
            self._refill()
        _, _, start, length = self._next[-1]
        return min(length - self._offset, self._most), int(start + self._offset == 0)

    def take(self) -> Piece:
        """The next piece."""
        while not self._next:
            self._refill()
        piece = self._next[-1]
        if self._offset or piece.length > self._most:
            rest = piece._replace(start=piece.start + self._offset, length=piece.length - self._offset)
            if rest.length > self._most:
                self._offset += self._most
                return rest._replace(length=self._most)
            self._offset = 0
            piece = rest
        self._next.pop()
        self._taken += 1
        return piece

    def _refill(self) -> None:
        if self._layout is None:
            self._laid_out_for = self._laid_out_for or self._most
            self._layout = self._pieces.block(self.epoch, self._block, self._laid_out_for)
        some = self._layout[self._taken : self._taken + _SLICE][::-1]
        columns = ((some[:, 0] + self._first_document).tolist(), some[:, 1].tolist(), some[:, 2].tolist())
        self._next = list(map(_as_piece, zip(repeat(self.epoch), *columns, strict=False)))
        if not self._next:
            last = self._block + 1 == self._pieces.num_blocks
            self._begin(*((self.epoch + 1, 0) if last else (self.epoch, self._block + 1)))

    def begin_epoch(self) -> None:
        """Leave the rest of the epoch out and begin the next; an epoch of which nothing was taken is begun already."""
        if (self._block, self._taken, self._offset) != (0, 0, 0):
            self._begin(self.epoch + 1)

    def state_dict(self) -> CursorState:
        """The place, as JSON."""
        return {
            "epoch": self.epoch,
            "block": self._block,
            "laid_out_for": self._laid_out_for,
            "taken": self._taken,
            "offset": self._offset,
        }

    def load_state_dict(self, state: CursorState) -> None:
        """Go on from a place; takes as long as laying out one block, wherever it is."""
        self._begin(state["epoch"], state["block"])
        self._laid_out_for, self._taken, self._offset = state["laid_out_for"], state["taken"], state["offset"]
