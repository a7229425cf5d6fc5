"""Greedy packing: pieces of documents into rows. No I/O, no randomness, no tokens: lengths are all it sees.

A small window of pieces waits. Each row begins with the piece that has waited longest, is filled in order of arrival
while much room is left, and is finished with the one or two waiting pieces that leave the least room. To choose the
last pieces of a row among many is what makes rows full: best fit, which must give a row to each piece as it comes,
leaves 6 % of a row of 1,024 empty where documents are all about a third of it, and this 0.3 % (benchmarks/RESULTS.md).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypedDict

from modernbert_train.read_json import Count


class Piece(NamedTuple):
    """A stretch of a document that becomes one sequence.

    Attributes:
        epoch: pass over its stream in which the document was drawn.
        document: its number, through all streams.
        start: first token of the stretch within the document.
        length: tokens of the stretch, special tokens not included.
    """

    epoch: int
    document: int
    start: int
    length: int

    def cut(self, most: int) -> Iterator[Piece]:
        """The piece in stretches of at most so many tokens, in order."""
        for offset in range(0, self.length, most):
            yield self._replace(start=self.start + offset, length=min(most, self.length - offset))


PieceState = tuple[Count, Count, Count, Count]  # a piece as JSON


class PackerState(TypedDict):
    """A packer's memory as JSON.

    Attributes:
        row_tokens: capacity of a row.
        ready: finished rows, each a list of pieces.
        waiting: of each waiting piece the number of rows finished since it came, and the piece.
    """

    row_tokens: Count
    ready: list[list[PieceState]]
    waiting: list[tuple[Count, PieceState]]


SPECIAL_TOKENS = 2  # [CLS] before and [SEP] after each sequence
SMALLEST_SEQUENCE = 1 + SPECIAL_TOKENS
WINDOW = 128  # pieces that wait, unless the configuration says otherwise
_BULK = 3  # a row is filled in order of arrival while it has room for more than this many average pieces
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
        packer.place(Piece(0, index, 0, length - SPECIAL_TOKENS))
    packer.flush()
    return [[piece.document for piece in row] for row in packer.ready]


class GreedyPacker:
    """Packs pieces one after the other; finished rows wait in `ready`.

    From the moment a piece is placed until its row is finished, at most `max_wait + window` other rows are: every row
    that is made of waiting pieces takes the oldest, and no piece is passed over once max_wait rows were finished.

    Args:
        row_tokens: capacity of one row, in tokens.
        window: pieces kept waiting; more of them pack tighter.
        max_wait: a row is made as soon as the oldest piece has seen so many rows go by. Pieces that fill a row alone
            never wait, so without this bound a stream of them could hold up the others for ever.
    """

    def __init__(self, row_tokens: int, window: int, max_wait: int) -> None:
        self.row_tokens = row_tokens
        self.ready: deque[tuple[Piece, ...]] = deque()
        self._window = window
        self._max_wait = max_wait
        self._tolerance = row_tokens // 256  # room at the end of a row that is not worth a longer search
        # code -> waiting piece and the rows finished before it came, oldest first; a code is its length and a number
        self._waiting: dict[int, tuple[Piece, int]] = {}
        self._by_length: list[int] = []  # codes, sorted
        self._tokens = 0  # of the waiting pieces, special tokens included
        self._next_serial = 0
        self._num_finished = 0

    def add(self, epoch: int, document: int, length: int) -> None:
        """Cut the first `length` tokens of a document into pieces that fit a row, and place them."""
        for piece in Piece(epoch, document, 0, length).cut(self.row_tokens - SPECIAL_TOKENS):
            self.place(piece)

    def place(self, piece: Piece) -> None:
        """Take one piece, no longer than a row; finish rows as they fall due."""
        if piece.length + SPECIAL_TOKENS + SMALLEST_SEQUENCE > self.row_tokens:
            self.ready.append((piece,))
            self._num_finished += 1
        else:
            self._wait(piece, self._num_finished)
            if len(self._waiting) <= self._window:
                return  # no row was finished, so none has become overdue
        while len(self._waiting) > self._window or self._overdue():
            self._finish_row()

    def flush(self) -> None:
        """Make rows of all that waits."""
        while self._waiting:
            self._finish_row()

    def waiting(self) -> list[Piece]:
        """Pieces placed and not given out, in the order in which they would be packed anew."""
        return [piece for row in self.ready for piece in row] + [piece for piece, _ in self._waiting.values()]

    def state_dict(self) -> PackerState:
        """Everything the next rows depend on, as JSON."""
        return {
            "row_tokens": self.row_tokens,
            "ready": [list(row) for row in self.ready],
            "waiting": [(self._num_finished - born, piece) for piece, born in self._waiting.values()],
        }

    def load_state_dict(self, state: PackerState) -> None:
        """Take over a state made with the same settings."""
        self.__init__(state["row_tokens"], self._window, self._max_wait)  # type: ignore[misc]
        self.ready.extend(tuple(Piece(*piece) for piece in row) for row in state["ready"])
        for age, piece in state["waiting"]:
            self._wait(Piece(*piece), -age)

    def _wait(self, piece: Piece, born: int) -> None:
        need = piece.length + SPECIAL_TOKENS
        code = need * _SERIALS + self._next_serial
        self._next_serial += 1
        self._waiting[code] = (piece, born)
        insort(self._by_length, code)
        self._tokens += need

    def _overdue(self) -> bool:
        if not self._waiting:
            return False
        _, born = next(iter(self._waiting.values()))
        return self._num_finished - born >= self._max_wait

    def _finish_row(self) -> None:
        """Make one row of waiting pieces, the oldest first."""
        row: list[Piece] = []
        room = self._take(self._in_order(), row, self.row_tokens)
        while room >= SMALLEST_SEQUENCE and (found := self._best_fit(room)):
            room = self._take(found, row, room)
        self.ready.append(tuple(row))
        self._num_finished += 1

    def _in_order(self) -> list[int]:
        """The oldest piece, and those after it that fit as long as much room is left."""
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

    def _take(self, codes: Sequence[int], row: list[Piece], room: int) -> int:
        """Move pieces into a row; returns the room that is left."""
        for code in codes:
            row.append(self._waiting.pop(code)[0])
            del self._by_length[bisect_left(self._by_length, code)]
            need = code // _SERIALS
            self._tokens -= need
            room -= need
        return room

    def _best_fit(self, room: int) -> tuple[int, ...]:
        """The one or two waiting pieces that leave the least room, or at most the tolerance; none if none fits.

        Long pieces are tried first: what is short is easier to place later.
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
