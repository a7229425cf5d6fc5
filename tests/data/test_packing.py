"""Packing: every chunk exactly once, no row overfilled, little padding, no chunk waits forever.

If this breaks, text is silently lost or repeated, or the GPU computes on padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modernbert_train.data.packing import SPECIAL_TOKENS, Chunk, GreedyPacker, pack_greedy

Streams = st.tuples(
    st.integers(8, 100).flatmap(lambda row: st.tuples(st.just(row), st.lists(st.integers(1, row - 2), max_size=60))),
    st.integers(1, 9),
    st.integers(1, 12),
)
LongLengths = st.lists(st.integers(1, 598), max_size=60)
LongRows = st.tuples(st.tuples(st.just(600), LongLengths), st.integers(1, 9), st.just(99))


class Slow:
    """The rule said plainly: try every chunk and every pair. Kept as a reference, cubic."""

    def __init__(self, row_tokens: int, window: int, max_wait: int) -> None:
        self.row_tokens, self.window, self.max_wait = row_tokens, window, max_wait
        self.waiting: list[tuple[int, int, int]] = []  # tokens, number, rows closed before it came; oldest first
        self.closed: list[list[int]] = []

    def place(self, number: int, need: int) -> None:
        if self.row_tokens - need <= SPECIAL_TOKENS:
            self.closed.append([number])
        else:
            self.waiting.append((need, number, len(self.closed)))
        while len(self.waiting) > self.window or (
            self.waiting and len(self.closed) - self.waiting[0][2] >= self.max_wait
        ):
            self.close()

    def close(self) -> None:
        row = [self.waiting.pop(0)]
        for chunk in list(self.waiting):
            if self.room(row) <= 3 * sum(need for need, _, _ in self.waiting) / max(1, len(self.waiting)):
                break
            if chunk[0] <= self.room(row):
                self.waiting.remove(chunk)
                row.append(chunk)
        while found := self.best(self.room(row)):
            for chunk in found:
                self.waiting.remove(chunk)
                row.append(chunk)
        self.closed.append([number for _, number, _ in row])

    def room(self, row: list[tuple[int, int, int]]) -> int:
        return self.row_tokens - sum(need for need, _, _ in row)

    def best(self, room: int) -> list[tuple[int, int, int]]:
        """The fill that leaves least; or, if some leave hardly anything, the one of these with the longest chunk."""
        chunks = sorted(self.waiting, reverse=True)
        fills = []
        for at, long in enumerate(chunks):
            for fill in ([long], *([long, short] for short in chunks[at + 1 :])):
                left = room - sum(need for need, _, _ in fill)
                if left >= 0:
                    fills.append((left, at, fill))
        good = [fill for fill in fills if fill[0] <= self.row_tokens // 256]
        longest = [fill for fill in good if fill[1] == min(good, key=lambda fill: fill[1])[1]]
        return min(longest or fills, key=lambda fill: fill[:2], default=(0, 0, []))[2]


def used(row: Sequence[Chunk]) -> int:
    return sum(chunk.length + SPECIAL_TOKENS for chunk in row)


@pytest.mark.parametrize(
    ("lengths", "row_tokens", "window", "rows"),
    [
        # the fourth is one too many to wait: 4 fills the oldest, 6, best; then 5 with 3 and 2
        ([6, 5, 3, 4, 2], 10, 3, [[0, 3], [1, 2, 4]]),
        # room for 5 after the oldest: 4 alone leaves 1, and 3 with 2 leave 0
        ([5, 4, 3, 2], 10, 3, [[0, 2, 3], [1]]),
        # after 3 there is room for more than three of the others, so 6 comes before 7; then 6 and 4 fill it
        ([3, 6, 4, 7, 5, 4, 6], 30, 6, [[0, 1, 2, 3, 6, 5], [4]]),
        # what fills a row alone does not wait
        ([5, 8, 10, 4], 10, 3, [[1], [2], [0, 3]]),
    ],
)
def test_by_hand(lengths: list[int], row_tokens: int, window: int, rows: list[list[int]]) -> None:
    assert pack_greedy(lengths, row_tokens, window) == rows


@pytest.mark.parametrize("length", [0, 11])
def test_a_sequence_that_fits_no_row_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=rf"sequence 1 has {length} tokens, a row holds 1 to 10"):
        pack_greedy([5, length], row_tokens=10)


@pytest.mark.runs
@settings(max_examples=100, deadline=None)
@given(st.one_of(Streams, LongRows))
def test_the_packer_equals_the_plain_rule(stream: tuple[tuple[int, list[int]], int, int]) -> None:
    (row_tokens, lengths), window, max_wait = stream
    packer, slow = GreedyPacker(row_tokens, window, max_wait), Slow(row_tokens, window, max_wait)
    for document, length in enumerate(lengths):
        packer.place(Chunk(0, document, 0, length))
        slow.place(document, length + SPECIAL_TOKENS)
        assert [[chunk.document for chunk in row] for row in packer.ready] == slow.closed


def test_a_chunk_is_cut_by_rule() -> None:
    assert list(Chunk(1, 7, 100, 25).cut(10)) == [Chunk(1, 7, 100, 10), Chunk(1, 7, 110, 10), Chunk(1, 7, 120, 5)]
    assert list(Chunk(1, 7, 100, 10).cut(10)) == [Chunk(1, 7, 100, 10)]


@pytest.mark.runs
@pytest.mark.parametrize(
    ("row_tokens", "median", "spread", "least"),
    [(1024, 250, 1.0, 0.995), (8192, 1100, 1.0, 0.998), (1024, 320, 0.3, 0.99)],
)
def test_rows_are_nearly_full(row_tokens: int, median: int, spread: float, least: float) -> None:
    """Log-normal lengths, which web text has, and abstracts, none of them short; the share that is no padding."""
    lengths = np.maximum(1, np.random.default_rng(1).lognormal(np.log(median), spread, 8000)).astype(int)
    packer = GreedyPacker(row_tokens, window=128, max_wait=2048)
    for document, length in enumerate(lengths.tolist()):
        packer.add(0, document, length)
    assert len(packer.ready) > 1000
    assert sum(map(used, packer.ready)) / (len(packer.ready) * row_tokens) >= least
