"""Packing: every piece exactly once, no row overfilled, little padding, nobody waits for ever.

If this breaks, text is silently lost or repeated, or the GPU computes on padding.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modernbert_train.data.packing import SMALLEST_SEQUENCE, SPECIAL_TOKENS, GreedyPacker, Piece, pack_greedy

Streams = st.tuples(
    st.integers(8, 100).flatmap(lambda row: st.tuples(st.just(row), st.lists(st.integers(1, row - 2), max_size=60))),
    st.integers(1, 6),
    st.integers(0, 12),
)


class Slow:
    """Best fit said plainly: look at every open row for each sequence. Kept as a reference, quadratic."""

    def __init__(self, row_tokens: int, open_rows: int, max_age: int) -> None:
        self.row_tokens, self.open_rows, self.max_age = row_tokens, open_rows, max_age
        self.rows: list[dict] = []  # open ones, oldest first
        self.closed: list[list[int]] = []

    def close(self, row: dict) -> None:
        self.rows.remove(row)
        self.closed.append(row["sequences"])

    def place(self, sequence: int, need: int) -> None:
        fitting = [row for row in self.rows if row["room"] >= need]
        if not fitting:
            if len(self.rows) == self.open_rows:
                self.close(min(self.rows, key=lambda row: row["room"]))
            fitting = [{"room": self.row_tokens, "sequences": [], "opened": len(self.closed)}]
            self.rows += fitting
        fullest = min(fitting, key=lambda row: row["room"])
        fullest["sequences"].append(sequence)
        fullest["room"] -= need
        if fullest["room"] < SMALLEST_SEQUENCE:
            self.close(fullest)
        while self.rows and len(self.closed) - self.rows[0]["opened"] > self.max_age:
            self.close(self.rows[0])


def used(row: Sequence[Piece]) -> int:
    return sum(piece.length + SPECIAL_TOKENS for piece in row)


def tokens_of(rows: Sequence[Sequence[Piece]]) -> list[tuple[int, int, int]]:
    """Every (epoch, document, token) in the rows, sorted; a token given twice appears twice."""
    return sorted((p.epoch, p.document, t) for row in rows for p in row for t in range(p.start, p.start + p.length))


def all_rows(packer: GreedyPacker) -> list[tuple[Piece, ...]]:
    packer.flush()
    return list(packer.ready)


def test_by_hand() -> None:
    """Rows of 10. 6 opens a, 5 opens b, 4 fills a. 8 opens c and closes it: no sequence fits into 2. 3 goes into b."""
    assert pack_greedy([6, 5, 4, 8, 3], row_tokens=10, open_rows=4) == [[0, 2], [3], [1, 4]]


def test_the_fullest_row_with_room_wins() -> None:
    """Rooms 5 and 3: a sequence of 3 goes where 3 are left, and 5 remain for the next."""
    assert pack_greedy([5, 7, 3, 5], row_tokens=10, open_rows=4) == [[1, 2], [0, 3]]


def test_the_fullest_row_is_given_up_when_too_many_are_open() -> None:
    assert pack_greedy([6, 7, 5, 4], row_tokens=10, open_rows=2) == [[1], [0, 3], [2]]


@pytest.mark.parametrize("length", [0, 11])
def test_a_sequence_that_fits_no_row_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=rf"sequence 1 has {length} tokens, a row holds 1 to 10"):
        pack_greedy([5, length], row_tokens=10)


@settings(max_examples=50, deadline=None)
@given(Streams)
def test_the_packer_equals_plain_best_fit(stream: tuple[tuple[int, list[int]], int, int]) -> None:
    (row_tokens, lengths), open_rows, max_age = stream
    packer, slow = GreedyPacker(row_tokens, open_rows, max_age), Slow(row_tokens, open_rows, max_age)
    for document, length in enumerate(lengths):
        packer.place(Piece(0, document, 0, length))
        slow.place(document, length + SPECIAL_TOKENS)
        assert [[piece.document for piece in row] for row in packer.ready] == slow.closed


@settings(max_examples=50, deadline=None)
@given(Streams)
def test_every_piece_appears_once_and_no_row_overflows(stream: tuple[tuple[int, list[int]], int, int]) -> None:
    (row_tokens, lengths), open_rows, max_age = stream
    packer = GreedyPacker(row_tokens, open_rows, max_age)
    for document, length in enumerate(lengths):
        packer.place(Piece(0, document, 0, length))
    rows = all_rows(packer)
    assert sorted(piece.document for row in rows for piece in row) == list(range(len(lengths)))
    assert all(0 < used(row) <= row_tokens for row in rows)


@settings(max_examples=50, deadline=None)
@given(st.integers(8, 60), st.lists(st.integers(1, 300), max_size=20))
def test_cutting_covers_a_document_exactly(row_tokens: int, lengths: list[int]) -> None:
    packer = GreedyPacker(row_tokens, 4, 100)
    for document, length in enumerate(lengths):
        packer.add(3, document, length)
    rows = all_rows(packer)
    assert tokens_of(rows) == [(3, d, t) for d, length in enumerate(lengths) for t in range(length)]
    for document, length in enumerate(lengths):
        pieces = sorted(piece for row in rows for piece in row if piece.document == document)
        assert all(piece.length == row_tokens - SPECIAL_TOKENS for piece in pieces[:-1])
        assert len(pieces) == -(-length // (row_tokens - SPECIAL_TOKENS))


@settings(max_examples=50, deadline=None)
@given(Streams)
def test_no_piece_waits_longer_than_promised(stream: tuple[tuple[int, list[int]], int, int]) -> None:
    """Rows opened at the same moment fall due together, so the last of them may come open_rows later."""
    (row_tokens, lengths), open_rows, max_age = stream
    packer = GreedyPacker(row_tokens, open_rows, max_age)
    placed_at = []
    for document, length in enumerate(lengths):
        placed_at.append(len(packer.ready))
        packer.place(Piece(0, document, 0, length))
    for index, row in enumerate(all_rows(packer)):
        assert all(index - placed_at[piece.document] <= max_age + open_rows + 1 for piece in row)


def test_an_old_row_is_closed_though_it_has_room() -> None:
    """Without this a short document could wait in an open row for ever."""
    packer = GreedyPacker(row_tokens=20, open_rows=8, max_age=5)
    packer.place(Piece(0, 0, 0, 1))
    for document in range(1, 8):
        packer.place(Piece(0, document, 0, 17))  # 19 tokens: no room beside the first, closed at once
    assert [row[0].document for row in packer.ready] == [1, 2, 3, 4, 5, 6, 0, 7]


@settings(max_examples=50, deadline=None)
@given(Streams, st.integers(0, 60))
def test_a_saved_packer_goes_on_with_the_same_rows(stream: tuple[tuple[int, list[int]], int, int], stop: int) -> None:
    (row_tokens, lengths), open_rows, max_age = stream
    whole, first = (GreedyPacker(row_tokens, open_rows, max_age) for _ in range(2))
    for document, length in enumerate(lengths):
        whole.place(Piece(0, document, 0, length))
        if document < stop:
            first.place(Piece(0, document, 0, length))
    second = GreedyPacker(row_tokens, open_rows, max_age)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state_dict() == first.state_dict()
    for document, length in enumerate(lengths[stop:], start=min(stop, len(lengths))):
        second.place(Piece(0, document, 0, length))
    assert second.state_dict() == whole.state_dict()
    assert all_rows(second) == all_rows(whole)


@settings(max_examples=50, deadline=None)
@given(Streams, st.integers(0, 20))
def test_the_waiting_tokens_are_those_not_given_out(stream: tuple[tuple[int, list[int]], int, int], given: int) -> None:
    (row_tokens, lengths), open_rows, max_age = stream
    packer = GreedyPacker(row_tokens, open_rows, max_age)
    for document, length in enumerate(lengths):
        packer.place(Piece(0, document, 0, length))
    rows = [packer.ready.popleft() for _ in range(min(given, len(packer.ready)))]
    assert packer.num_waiting_tokens() == sum(lengths) - sum(piece.length for row in rows for piece in row)


@pytest.mark.parametrize(("row_tokens", "median", "least"), [(1024, 250, 0.99), (8192, 1100, 0.995)])
def test_rows_are_nearly_full(row_tokens: int, median: int, least: float) -> None:
    """Log-normal lengths, which web text has; the share of the rows closed so far that is no padding."""
    lengths = np.maximum(1, np.random.default_rng(1).lognormal(np.log(median), 1.0, 8000)).astype(int)
    packer = GreedyPacker(row_tokens, open_rows=64, max_age=2048)
    for document, length in enumerate(lengths.tolist()):
        packer.add(0, document, length)
    assert len(packer.ready) > 1000
    assert sum(map(used, packer.ready)) / (len(packer.ready) * row_tokens) >= least
