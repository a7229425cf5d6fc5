"""Greedy packing: chunks of documents into rows. No I/O, no randomness, no tokens: only lengths.

A small window of chunks waits. Each row starts with the chunk that has waited longest, is filled in order of arrival
while much room is left, and is finished with the one or two waiting chunks that leave the least room. This last choice
makes rows full: best fit, which must assign a row to each chunk on arrival, leaves 6 % of a row of 1,024 empty for
documents of about a third of it; this leaves 0.3 % (benchmarks/RESULTS.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypedDict, overload

import numpy as np
from numpy.typing import NDArray

from modernbert_train.core.read_json import Count


class Chunk(NamedTuple):
    """A part of a document that becomes one sequence.

    Attributes:
        epoch: pass over its stream in which the document was drawn.
        document: its number, through all streams.
        start: its first token within the document.
        length: its tokens, without special tokens.
    """

    epoch: int
    document: int
    start: int
    length: int

    def cut(self, max_tokens: int) -> Iterator[Chunk]:
        """Yield the chunk in parts of at most `max_tokens` tokens, in order."""
        for offset in range(0, self.length, max_tokens):
            yield self._replace(start=self.start + offset, length=min(max_tokens, self.length - offset))


ChunkState = tuple[Count, Count, Count, Count]  # a chunk as JSON


class PackerState(TypedDict):
    """A packer's state as JSON.

    Attributes:
        row_tokens: capacity of a row.
        ready: finished rows, each a list of chunks.
        waiting: for each waiting chunk, the number of rows finished since it arrived, and the chunk.
    """

    row_tokens: Count
    ready: list[list[ChunkState]]
    waiting: list[tuple[Count, ChunkState]]


SPECIAL_TOKENS = 2  # for most objectives: [CLS] before and [SEP] after each sequence
WINDOW = 128  # default number of waiting chunks
_BULK = 3  # a row is filled in order of arrival while it has room for more than this many average chunks
_as_chunk = partial(tuple.__new__, Chunk)  # Chunk(*values), three times as fast
Row = tuple[Chunk, ...]
Ints = NDArray[np.int64]
_ONE_STREAM: Ints = np.zeros(1, dtype=np.int64)


class Rows(Sequence[Row]):
    """Rows of chunks as arrays; indexing returns tuples of `Chunk`.

    Args:
        chunks_C4: of all rows, concatenated: epoch, document, start, length.
        ends_R: number of chunks at the end of each row.
    """

    def __init__(self, chunks_C4: Ints, ends_R: Ints) -> None:
        self.chunks_C4 = chunks_C4
        self.ends_R = ends_R

    def __len__(self) -> int:
        return len(self.ends_R)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Row, ...]: ...
    def __getitem__(self, index: int | slice) -> Row | tuple[Row, ...]:
        if isinstance(index, slice):
            return tuple(self[at] for at in range(*index.indices(len(self))))
        at = range(len(self))[index]
        first = int(self.ends_R[at - 1]) if at else 0
        return tuple(map(_as_chunk, self.chunks_C4[first : int(self.ends_R[at])].tolist()))

    def __iter__(self) -> Iterator[Row]:
        chunks, first = list(map(_as_chunk, self.chunks_C4.tolist())), 0
        for end in self.ends_R.tolist():
            yield tuple(chunks[first:end])
            first = end

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Rows):
            return np.array_equal(self.ends_R, other.ends_R) and np.array_equal(self.chunks_C4, other.chunks_C4)
        return tuple(self) == other

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(tuple(self))


def pack_greedy(lengths: Sequence[int], row_tokens: int, window: int = WINDOW) -> list[list[int]]:
    """Place sequences into rows; no sequence is split.

    Args:
        lengths: tokens in each sequence, special tokens included, in arrival order.
        row_tokens: capacity of one row, in tokens.
        window: largest number of sequences waiting for a row.

    Returns:
        One list of indices into `lengths` per row, in the order in which the rows were made; every index appears
        exactly once.

    Raises:
        ValueError: a sequence is longer than a row or empty; names its index and both lengths.
    """
    packer = GreedyPacker(row_tokens, window, max_wait=len(lengths) + 1)  # there are fewer rows: none is overdue
    for index, length in enumerate(lengths):
        if not 0 < length <= row_tokens:
            raise ValueError(f"sequence {index} has {length} tokens, a row holds 1 to {row_tokens}. Split it first.")
        packer.place(Chunk(0, index, 0, length - SPECIAL_TOKENS))
    packer.flush()
    return [[chunk.document for chunk in row] for row in packer.ready]


class GreedyPacker:
    """Packs chunks one after the other; finished rows are kept until they are taken.

    Between placing a chunk and finishing its row, at most `max_wait + window` other rows are finished: every row built
    from waiting chunks takes the oldest, and no chunk is skipped once max_wait rows were finished.

    Args:
        row_tokens: capacity of one row, in tokens.
        window: number of waiting chunks; more of them pack tighter.
        max_wait: a row is made once this many rows were finished while the oldest chunk waited. Chunks that fill a row
            alone never wait, so without this bound a stream of them could delay the others forever.
        special_tokens: of each chunk; see `ObjectiveConfig`.
    """

    def __init__(self, row_tokens: int, window: int, max_wait: int, special_tokens: int = SPECIAL_TOKENS) -> None:
        from modernbert_train.data import pack_kernel  # imports numba, which takes a third of a second

        self._kernel: Any = pack_kernel
        self.row_tokens = row_tokens
        self._special = special_tokens
        self._window = window
        self._max_wait = max_wait
        tolerance = row_tokens // 256  # room at the end of a row that is not worth a longer search
        words = row_tokens // 64 + 1
        above = (words + 63) // 64
        # callers other than the planner may give any number, and the kernel's integers have 64 bits
        rule = (row_tokens, window, min(max_wait, 1 << 62), special_tokens, tolerance, _BULK, above)
        self._rule = np.array(rule, dtype=np.int64)
        self._by_need = np.zeros((row_tokens + 1, 2), dtype=np.int32)
        self._bits = np.zeros(above + words, dtype=np.int64)
        self._make_slots(window + 2)  # the window overflows by one chunk, which is what makes a row
        self._done = np.zeros(2, dtype=np.int64)  # finished chunks and rows that were not taken
        self._out = np.empty((0, 4), dtype=np.int64)
        self._ends = np.empty(0, dtype=np.int64)

    def _make_slots(self, number: int) -> None:
        """Allocate slots for this many waiting chunks, all free."""
        kernel = self._kernel
        self._state = np.zeros(4, dtype=np.int64)
        self._waiting = np.zeros((number + 1, 9), dtype=np.int64)
        # a free slot links to the next one; the last, the sentinel, links to itself: the list by age is empty
        self._waiting[:, kernel.AFTER] = np.arange(1, number + 2)
        self._waiting[number, [kernel.AFTER, kernel.BEFORE]] = number

    @property
    def _memory(self) -> tuple[Any, ...]:
        return (self._out, self._ends, self._done, self._state, self._waiting, self._by_need, self._bits, self._rule)

    def _by_age(self) -> Ints:
        """Return the waiting chunks, oldest first."""
        slots, slot, last = [], len(self._waiting) - 1, len(self._waiting) - 1
        while (slot := int(self._waiting[slot, self._kernel.AFTER])) != last:
            slots.append(slot)
        return self._waiting[slots]

    def _make_room(self, chunks: int) -> None:
        """Reserve memory for the rows that this many more chunks may finish."""
        needed = int(self._done[0] + self._state[self._kernel.N]) + chunks
        if needed > len(self._out):  # `ends` is as long: a row has at least one chunk
            out, ends = np.empty((2 * needed, 4), dtype=np.int64), np.empty(2 * needed, dtype=np.int64)
            out[: self._done[0]], ends[: self._done[1]] = self._out[: self._done[0]], self._ends[: self._done[1]]
            self._out, self._ends = out, ends

    @property
    def ready(self) -> Rows:
        """Finished rows that were not taken, in order."""
        return Rows(self._out[: self._done[0]], self._ends[: self._done[1]])

    @property
    def num_ready(self) -> int:
        """Number of finished rows that were not taken."""
        return int(self._done[1])

    def take_rows(self, number: int, firsts_S: Ints = _ONE_STREAM) -> tuple[Rows, Ints]:
        """Take the first of the finished rows.

        Args:
            number: of rows.
            firsts_S: number of the first document of each stream.

        Returns:
            The rows; and int64 [streams, 2], for each stream its tokens and its starting documents in them.
        """
        chunks = int(self._ends[number - 1]) if number else 0
        chunks_C4, ends_R = np.empty((chunks, 4), np.int64), np.empty(number, np.int64)
        counts_S2 = np.zeros((len(firsts_S), 2), np.int64)
        self._kernel.take(chunks_C4, ends_R, firsts_S, counts_S2, self._out, self._ends, self._done)
        return Rows(chunks_C4, ends_R), counts_S2

    def add(self, epoch: int, document: int, length: int) -> None:
        """Cut the first `length` tokens of a document into chunks that fit a row, and place them."""
        for chunk in Chunk(epoch, document, 0, length).cut(self.row_tokens - self._special):
            self.place(chunk)

    def place(self, chunk: Chunk) -> None:
        """Place one chunk, no longer than a row; finish rows when they are due."""
        some_C3 = np.array([chunk[1:]], dtype=np.int64)
        self.place_many(some_C3, chunk.epoch, 0, num_rows=self.num_ready + 1)  # one more, or it would place nothing

    def place_many(self, chunks_C3: Ints, epoch: int, first_document: int, num_rows: int) -> int:
        """Place chunks until enough rows are ready.

        Args:
            chunks_C3: document, first token, number of tokens.
            epoch: of all of them.
            first_document: added to their document numbers.
            num_rows: number of ready rows.

        Returns:
            The number of chunks placed.
        """
        self._make_room(len(chunks_C3))
        taken: int = self._kernel.place_many(chunks_C3, epoch, first_document, num_rows, *self._memory)
        return taken

    def mix_many(self, chunks_C3: Ints, queue: tuple[Any, ...], num_rows: int) -> None:
        """Place chunks of several streams in fair order; see `pack_kernel.mix_many`."""
        self._make_room(len(chunks_C3))
        self._kernel.mix_many(chunks_C3, *queue, num_rows, *self._memory)

    def flush(self) -> None:
        """Finish rows until no chunk waits."""
        self._make_room(0)
        while self._state[self._kernel.N]:
            self._done[0] = self._kernel.finish_row(self._out, self._done[0], *self._memory[3:])
            self._ends[self._done[1]] = self._done[0]
            self._done[1] += 1

    def waiting(self) -> list[Chunk]:
        """Chunks that wait, in the order in which they would be placed again."""
        chunks = [*self._out[: self._done[0]].tolist(), *self._by_age()[:, :4].tolist()]
        return [_as_chunk(chunk) for chunk in chunks]

    def state_dict(self) -> PackerState:
        """Return everything that determines the next rows, as JSON."""
        in_order = self._by_age()
        ages = (self._state[self._kernel.FINISHED] - in_order[:, self._kernel.BORN]).tolist()
        return {
            "row_tokens": self.row_tokens,
            "ready": [list(row) for row in self.ready],
            "waiting": [(age, _as_chunk(chunk)) for age, chunk in zip(ages, in_order[:, :4].tolist(), strict=True)],
        }

    def load_state_dict(self, state: PackerState) -> None:
        """Restore a state saved with the same settings."""
        self.__init__(state["row_tokens"], self._window, self._max_wait, self._special)  # type: ignore[misc]
        self._make_slots(max(self._window, len(state["waiting"])) + 2)
        chunks = [chunk for row in state["ready"] for chunk in row]
        self._make_room(len(chunks) + len(state["waiting"]))
        self._done[:] = len(chunks), len(state["ready"])
        self._out[: len(chunks)] = np.array(chunks, dtype=np.int64).reshape(-1, 4)
        self._ends[: len(state["ready"])] = np.cumsum([len(row) for row in state["ready"]])
        for age, chunk in state["waiting"]:
            # rows are counted from 0 again: a chunk that has seen `age` rows finished arrived at row -age
            self._kernel.wait(np.array(chunk, dtype=np.int64), -age, *self._memory[3:])
