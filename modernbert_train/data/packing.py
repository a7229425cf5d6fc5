"""Greedy packing: chunks of documents into rows. No I/O, no randomness, no tokens: lengths are all it sees.

A small window of chunks waits. Each row begins with the chunk that has waited longest, is filled in order of arrival
while much room is left, and is finished with the one or two waiting chunks that leave the least room. To choose the
last chunks of a row among many is what makes rows full: best fit, which must give a row to each chunk as it comes,
leaves 6 % of a row of 1,024 empty where documents are all about a third of it, and this 0.3 % (benchmarks/RESULTS.md).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypedDict

from modernbert_train.read_json import Count


class Chunk(NamedTuple):
    """A part of a document that becomes one sequence.

    Attributes:
        epoch: pass over its stream in which the document was drawn.
        document: its number, through all streams.
        start: first token of it within the document.
        length: its tokens, special tokens not included.
    """

    epoch: int
    document: int
    start: int
    length: int

    def cut(self, most: int) -> Iterator[Chunk]:
        """The chunk in parts of at most so many tokens, in order."""
        for offset in range(0, self.length, most):
            yield self._replace(start=self.start + offset, length=min(most, self.length - offset))


ChunkState = tuple[Count, Count, Count, Count]  # a chunk as JSON


class PackerState(TypedDict):
    """A packer's memory as JSON.

    Attributes:
        row_tokens: capacity of a row.
        ready: finished rows, each a list of chunks.
        waiting: of each waiting chunk the number of rows finished since it came, and the chunk.
    """

    row_tokens: Count
    ready: list[list[ChunkState]]
    waiting: list[tuple[Count, ChunkState]]


SPECIAL_TOKENS = 2  # of most objectives: [CLS] before and [SEP] after each sequence
WINDOW = 128  # chunks that wait, unless the configuration says otherwise
_BULK = 3  # a row is filled in order of arrival while it has room for more than this many average chunks
_SERIALS = 1 << 40  # lengths and arrival numbers share an integer, so that sorting by it sorts by length, then age


def pack_greedy(lengths: Sequence[int], row_tokens: int, window: int = WINDOW) -> list[list[int]]:
    """Place sequences into rows; no sequence is split.

    Args:
        lengths: tokens in each sequence, special tokens included, in arrival order.
        row_tokens: capacity of one row, in tokens.
        window: sequences that may wait for a row at a time.

    Returns:
        One list of indices into `lengths` per row, in the order in which the rows were made; every index appears
        exactly once.

    Raises:
        ValueError: a sequence is longer than a row or empty; names its index and both lengths.
    """
    packer = GreedyPacker(row_tokens, window, max_wait=len(lengths) + 1)
    for index, length in enumerate(lengths):
        if not 0 < length <= row_tokens:
            raise ValueError(f"sequence {index} has {length} tokens, a row holds 1 to {row_tokens}. Split it first.")
        packer.place(Chunk(0, index, 0, length - SPECIAL_TOKENS))
    packer.flush()
    return [[chunk.document for chunk in row] for row in packer.ready]


class GreedyPacker:
    """Packs chunks one after the other; finished rows wait in `ready`.

    From the moment a chunk is placed until its row is finished, at most `max_wait + window` other rows are: every row
    that is made of waiting chunks takes the oldest, and no chunk is passed over once max_wait rows were finished.

    Args:
        row_tokens: capacity of one row, in tokens.
        window: chunks kept waiting; more of them pack tighter.
        max_wait: a row is made as soon as the oldest chunk has seen so many rows go by. Chunks that fill a row alone
            never wait, so without this bound a stream of them could hold up the others for ever.
        special_tokens: that each chunk gets; see `ObjectiveConfig`.
    """

    def __init__(self, row_tokens: int, window: int, max_wait: int, special_tokens: int = SPECIAL_TOKENS) -> None:
        self.row_tokens = row_tokens
        self._special = special_tokens
        self._smallest = 1 + special_tokens  # sequence
        self.ready: deque[tuple[Chunk, ...]] = deque()
        self._window = window
        self._max_wait = max_wait
        self._tolerance = row_tokens // 256  # room at the end of a row that is not worth a longer search
        # code -> waiting chunk and the rows finished before it came, oldest first; a code is its length and a number
        self._waiting: dict[int, tuple[Chunk, int]] = {}
        self._by_length: list[int] = []  # codes, sorted
        self._tokens = 0  # of the waiting chunks, special tokens included
        self._next_serial = 0
        self._num_finished = 0

    def add(self, epoch: int, document: int, length: int) -> None:
        """Cut the first `length` tokens of a document into chunks that fit a row, and place them."""
        for chunk in Chunk(epoch, document, 0, length).cut(self.row_tokens - self._special):
            self.place(chunk)

    def place(self, chunk: Chunk) -> None:
        """Take one chunk, no longer than a row; finish rows as they fall due."""
        if chunk.length + self._special + self._smallest > self.row_tokens:
            self.ready.append((chunk,))
            self._num_finished += 1
        else:
            self._wait(chunk, self._num_finished)
            if len(self._waiting) <= self._window:
                return  # no row was finished, so none has become overdue
        while len(self._waiting) > self._window or self._overdue():
            self._finish_row()

    def flush(self) -> None:
        """Make rows of all that waits."""
        while self._waiting:
            self._finish_row()

    def waiting(self) -> list[Chunk]:
        """Chunks placed and not given out, in the order in which they would be packed anew."""
        return [chunk for row in self.ready for chunk in row] + [chunk for chunk, _ in self._waiting.values()]

    def state_dict(self) -> PackerState:
        """Everything the next rows depend on, as JSON."""
        return {
            "row_tokens": self.row_tokens,
            "ready": [list(row) for row in self.ready],
            "waiting": [(self._num_finished - born, chunk) for chunk, born in self._waiting.values()],
        }

    def load_state_dict(self, state: PackerState) -> None:
        """Take over a state made with the same settings."""
        self.__init__(state["row_tokens"], self._window, self._max_wait, self._special)  # type: ignore[misc]
        self.ready.extend(tuple(Chunk(*chunk) for chunk in row) for row in state["ready"])
        for age, chunk in state["waiting"]:
            self._wait(Chunk(*chunk), -age)

    def _wait(self, chunk: Chunk, born: int) -> None:
        need = chunk.length + self._special
        code = need * _SERIALS + self._next_serial
        self._next_serial += 1
        self._waiting[code] = (chunk, born)
        insort(self._by_length, code)
        self._tokens += need

    def _overdue(self) -> bool:
        if not self._waiting:
            return False
        _, born = next(iter(self._waiting.values()))
        return self._num_finished - born >= self._max_wait

    def _finish_row(self) -> None:
        """Make one row of waiting chunks, the oldest first."""
        row: list[Chunk] = []
        room = self._take(self._in_order(), row, self.row_tokens)
        while room >= self._smallest and (found := self._best_fit(room)):
            room = self._take(found, row, room)
        self.ready.append(tuple(row))
        self._num_finished += 1

    def _in_order(self) -> list[int]:
        """The oldest chunk, and those after it that fit as long as much room is left."""
        found: list[int] = []
        room, tokens, number = self.row_tokens, self._tokens, len(self._waiting)
        for code in self._waiting:
            if found and room * number <= _BULK * tokens:
                break
            need = code // _SERIALS
            if need <= room:
                found.append(code)
                room, tokens, number = room - need, tokens - need, number - 1
        return found

    def _take(self, codes: Sequence[int], row: list[Chunk], room: int) -> int:
        """Move chunks into a row; returns the room that is left."""
        for code in codes:
            row.append(self._waiting.pop(code)[0])
            del self._by_length[bisect_left(self._by_length, code)]
            need = code // _SERIALS
            self._tokens -= need
            room -= need
        return room

    def _best_fit(self, room: int) -> tuple[int, ...]:
        """The one or two waiting chunks that leave the least room, or at most the tolerance; none if none fits.

        Long chunks are tried first: what is short is easier to place later.
        """
        lengths = self._by_length
        best: tuple[int, ...] = ()
        least = room
        at = bisect_left(lengths, (room + 1) * _SERIALS) - 1
        while at >= 0 and least > self._tolerance:
            long = lengths[at]
            need = long // _SERIALS
            if 2 * need < room - least:
                break  # two of this length or less leave more room
            left = room - need
            if left < least:
                best, least = (long,), left
            other = bisect_right(lengths, (left + 1) * _SERIALS, 0, at) - 1
            if other >= 0 and left - lengths[other] // _SERIALS < least:
                best, least = (long, lengths[other]), left - lengths[other] // _SERIALS
            at -= 1
        return best
