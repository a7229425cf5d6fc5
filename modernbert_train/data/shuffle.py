"""The order of an epoch: shuffled shards, then shuffled chunks within blocks of a few shards; keyed and stateless.

Within a block, chunks of documents are shuffled rather than documents, which would let a long document fill batch
after batch. A reader holds one block of shards at a time, and any position of any epoch is found in the time it takes
to lay out one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from modernbert_train.core.keyed_random import derive, permutation
from modernbert_train.core.read_json import Count
from modernbert_train.data.packing import Chunk, Ints

_SHARDS, _CHUNKS = 1, 2


class ShuffledChunks:
    """The chunks of every epoch, in order.

    Args:
        shard_documents: number of documents in each shard; documents are numbered through all shards in order.
        lengths: tokens of each document.
        block_shards: shards shuffled together.
        seed: the stream's seed.
        num_tokens: of all documents; None sums the lengths, which reads all of them.

    Attributes:
        num_documents, num_tokens, num_blocks: of one epoch.
    """

    def __init__(
        self,
        shard_documents: Sequence[int] | Ints,
        lengths: NDArray[np.integer],
        block_shards: int,
        seed: int,
        num_tokens: int | None = None,
    ) -> None:
        self._first = np.concatenate([[0], np.cumsum(np.asarray(shard_documents, dtype=np.int64))])
        self._lengths = lengths
        self._block_shards = block_shards
        self._seed = seed
        self._order: tuple[int, Ints] | None = None  # an epoch, and its shards
        self.num_documents = len(lengths)
        self.num_tokens = int(np.sum(lengths, dtype=np.int64)) if num_tokens is None else num_tokens
        self.num_blocks = -(-len(shard_documents) // block_shards)

    def length_of(self, document: int) -> int:
        """Return the tokens of one document, by its number within the stream."""
        return int(self._lengths[document])

    def block(self, epoch: int, block: int, chunk_tokens: int) -> NDArray[np.int64]:
        """Lay out one block.

        Args:
            epoch: from 0.
            block: from 0 to num_blocks - 1.
            chunk_tokens: longest chunk; longer documents are cut into chunks of this length and a rest.

        Returns:
            int64 [chunks, 3]: document, first token, number of tokens; every token of the block's documents once.
        """
        from modernbert_train.data import shuffle_kernel  # imports numba, which takes a third of a second

        members = self._shards_of(epoch)[block * self._block_shards : (block + 1) * self._block_shards]
        spans = [slice(first, end) for first, end in zip(self._first[members], self._first[members + 1], strict=True)]
        documents = np.concatenate([np.arange(span.start, span.stop) for span in spans])
        lengths = np.concatenate([self._lengths[span] for span in spans]).astype(np.int64)
        key = np.uint64(derive(self._seed, _CHUNKS, epoch, block, chunk_tokens))
        chunks: Ints = shuffle_kernel.lay_out(documents, lengths, chunk_tokens, key)
        return chunks

    def block_of(self, epoch: int, document: int) -> int:
        """Return the block of an epoch that has a document."""
        shard = int(np.searchsorted(self._first, document, side="right")) - 1
        return int(np.flatnonzero(self._shards_of(epoch) == shard)[0]) // self._block_shards

    def tokens_before(self, epoch: int, block: int) -> int:
        """Return the tokens of an epoch's earlier blocks; reads their documents' lengths."""
        members = self._shards_of(epoch)[: block * self._block_shards]
        spans = zip(self._first[members].tolist(), self._first[members + 1].tolist(), strict=True)
        return sum(int(self._lengths[first:end].sum(dtype=np.int64)) for first, end in spans)

    def _shards_of(self, epoch: int) -> Ints:
        """Return the order of the shards; the last epoch's order is cached."""
        kept = self._order  # another thread may use another epoch
        if kept is None or kept[0] != epoch:
            kept = self._order = epoch, permutation(len(self._first) - 1, derive(self._seed, _SHARDS, epoch))
        return kept[1]


class CursorState(TypedDict):
    """A position in a stream as JSON; see `ChunkCursor`.

    Attributes:
        given: tokens given out in this epoch, which follow from the other numbers and show if one of them was changed;
            not in older files.
    """

    epoch: Count
    block: Count
    laid_out_for: Count
    taken: Count
    offset: Count
    given: NotRequired[Count]


def tokens_given(state: CursorState, chunks: ShuffledChunks) -> int:
    """Return the tokens of an epoch before a position; reads the lengths of the epoch's earlier documents."""
    before = chunks.tokens_before(state["epoch"], state["block"])
    if not state["laid_out_for"]:
        return before
    block = chunks.block(state["epoch"], state["block"], state["laid_out_for"])
    return before + int(block[: state["taken"], 2].sum()) + state["offset"]


class ChunkCursor:
    """A position in the endless sequence of a stream's chunks, epoch after epoch; its state is a few numbers.

    A block is laid out for the longest chunk allowed when it begins. If shorter ones are required before its end, the
    remaining chunks are cut as they are given out, so a change of row length neither loses nor repeats tokens.

    Args:
        chunks: the stream's chunks.
        first_document: number of the stream's first document, counted over all streams.

    Attributes:
        epoch: pass over the stream.
        first_document: as passed.
    """

    def __init__(self, chunks: ShuffledChunks, first_document: int) -> None:
        self._chunks = chunks
        self.first_document = first_document
        self._max_tokens = 0  # longest chunk allowed now
        self._begin(0)

    def _begin(self, epoch: int, block: int = 0, num_given: int = 0) -> None:
        self.epoch, self._block = epoch, block
        self._given = num_given  # tokens given out in this epoch
        self._laid_out_for = 0  # longest chunk in the block; 0: not laid out yet
        self._taken = 0  # whole chunks of the block given out
        self._offset = 0  # tokens given out of the following chunk
        self._layout: Ints | None = None

    def allow(self, chunk_tokens: int) -> None:
        """Limit chunks to this many tokens from now on."""
        self._max_tokens = chunk_tokens

    def next_size(self) -> tuple[int, int]:
        """Return the size of the next chunk: its tokens, and 1 if a document starts in it, else 0."""
        _, start, length = self._upcoming()[0].tolist()
        return min(length - self._offset, self._max_tokens), int(start + self._offset == 0)

    def take(self) -> Chunk:
        """Return the next chunk."""
        document, start, length = self._upcoming()[0].tolist()
        chunk = Chunk(self.epoch, self.first_document + document, start, length)
        if self._offset or length > self._max_tokens:
            remainder = chunk._replace(start=start + self._offset, length=length - self._offset)
            if remainder.length > self._max_tokens:
                self._offset += self._max_tokens
                self._given += self._max_tokens
                return remainder._replace(length=self._max_tokens)
            self._offset = 0
            chunk = remainder
        self._taken += 1
        self._given += chunk.length
        return chunk

    def whole_chunks(self) -> Ints:
        """Return the next chunks that `take` would return uncut, as `ShuffledChunks.block` does: int64 [chunks, 3].

        At least one, all of one epoch; none if the next chunk must be cut first. `skip` consumes them.
        """
        upcoming = self._upcoming()
        return upcoming[:0] if self._offset or self._laid_out_for > self._max_tokens else upcoming

    def look(self) -> None:
        """Move to the next chunk: after the end of a block, to the start of the next."""
        self._upcoming()

    def skip(self, number: int) -> None:
        """Consume this many of `whole_chunks`."""
        assert self._layout is not None
        self._given += int(self._layout[self._taken : self._taken + number, 2].sum())
        self._taken += number

    def _upcoming(self) -> Ints:
        """Return the rest of the block; if it is empty, the next block."""
        while True:
            if self._layout is None:
                self._laid_out_for = self._laid_out_for or self._max_tokens
                self._layout = self._chunks.block(self.epoch, self._block, self._laid_out_for)
            if self._taken < len(self._layout):
                return self._layout[self._taken :]
            if self._block + 1 == self._chunks.num_blocks:
                self._begin(self.epoch + 1)
            else:
                self._begin(self.epoch, self._block + 1, self._given)

    def begin_epoch(self) -> None:
        """Skip the rest of the epoch and begin the next, unless nothing was taken from this one."""
        if (self._block, self._taken, self._offset) != (0, 0, 0):
            self._begin(self.epoch + 1)

    def state_dict(self) -> CursorState:
        """Return the position as JSON."""
        return {
            "epoch": self.epoch,
            "block": self._block,
            "laid_out_for": self._laid_out_for,
            "taken": self._taken,
            "offset": self._offset,
            "given": self._given,
        }

    def load_state_dict(self, state: CursorState) -> None:
        """Continue from a position that `check_state` has found possible; lays out one block, at any position."""
        num_given = state["given"] if "given" in state else tokens_given(state, self._chunks)
        self._begin(state["epoch"], state["block"], num_given)
        self._laid_out_for, self._taken, self._offset = state["laid_out_for"], state["taken"], state["offset"]
