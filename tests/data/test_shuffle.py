"""The order of chunks: every token once an epoch, long documents spread out, and any place reachable at once.

If this breaks, a resumed run sees other text than it would have, some never, or batches of one book only.
"""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modernbert_train.core.keyed_random import derive, permutation
from modernbert_train.data.packing import Chunk
from modernbert_train.data.shuffle import ChunkCursor, ShuffledChunks

Shards = st.lists(st.lists(st.integers(0, 40), max_size=6), min_size=1, max_size=10)


def make(shards: list[list[int]], block_shards: int, seed: int = 1) -> ShuffledChunks:
    lengths = np.array([length for shard in shards for length in shard], np.uint32)
    return ShuffledChunks([len(shard) for shard in shards], lengths, block_shards, seed)


def tokens_of(chunks: list[Chunk]) -> Counter[tuple[int, int, int]]:
    """How often each (epoch, document, token) occurs."""
    return Counter((p.epoch, p.document, token) for p in chunks for token in range(p.start, p.start + p.length))


@pytest.mark.runs
@settings(max_examples=100, deadline=None)
@given(Shards, st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=8), st.data())
def test_a_cursor_gives_every_token_once_whatever_lengths_are_requested(
    shards: list[list[int]], asked: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Longest chunks that grow and shrink at any place: an epoch loses nothing, and resuming changes nothing."""
    chunks = make(shards, 2)
    if chunks.num_tokens == 0:
        return
    cursor = ChunkCursor(chunks, first_document=100)
    stop = data.draw(st.integers(0, sum(number for _, number in asked)))
    given_out: list[Chunk] = []
    for most, number in asked:
        cursor.allow(most)
        for _ in range(number):
            if len(given_out) == stop:
                state = json.loads(json.dumps(cursor.state_dict()))
                cursor = ChunkCursor(make(shards, 2), first_document=100)
                cursor.load_state_dict(state)
                cursor.allow(most)
            if data.draw(st.booleans()):
                size = cursor.next_size()  # looking changes nothing
                assert size == cursor.next_size()
                given_out.append(cursor.take())
                assert size == (given_out[-1].length, int(given_out[-1].start == 0))
            else:
                given_out.append(cursor.take())
            assert 0 < given_out[-1].length <= most
    last = given_out[-1].epoch
    while given_out[-1].epoch == last:
        given_out.append(cursor.take())
    lengths = [length for shard in shards for length in shard]
    every = ((e, 100 + d, t) for e in range(last + 1) for d, length in enumerate(lengths) for t in range(length))
    assert tokens_of(given_out[:-1]) == Counter(every)


def test_a_cursor_starts_the_next_pass_at_the_given_place() -> None:
    cursor = ChunkCursor(make([[9, 9], [9]], 1), 0)
    cursor.allow(4)
    cursor.begin_epoch()
    assert cursor.take().epoch == 0  # an epoch that has not begun is not left out
    cursor.begin_epoch()
    cursor.begin_epoch()
    assert cursor.take().epoch == 1


@pytest.mark.parametrize("part", ["shards", "chunks"])
@pytest.mark.parametrize("other", [{"epoch": 1}, {"seed": 2}])
def test_the_order_of_shards_and_that_within_them_change_each_by_itself(part: str, other: dict[str, int]) -> None:
    """Either one alone would hide that the other repeats: the same text together in every epoch, or in every run."""

    def order(seed: int = 1, epoch: int = 0) -> list[int]:
        if part == "chunks":  # one shard: only the order within it is left
            return make([[5] * 20], 1, seed).block(epoch, 0, 10)[:, 0].tolist()
        chunks = make([[5]] * 20, 1, seed)  # one document in each: only the order of the shards is left
        return [document for block in range(20) for document in chunks.block(epoch, block, 10)[:, 0].tolist()]

    assert sorted(order()) == sorted(order(**other)) == list(range(20))
    assert order() != order(**other)


@pytest.mark.runs
@settings(max_examples=60, deadline=None)
@given(Shards, st.integers(1, 5), st.integers(0, 2**31 - 1), st.integers(1, 50))
def test_the_compiled_order_is_the_permutation(shards: list[list[int]], block: int, seed: int, most: int) -> None:
    """Chunks in the order of their documents, ordered by `permutation`: the shuffle of every past run."""
    chunks = make(shards, block, seed)
    order = permutation(len(shards), derive(seed, 1, 3))
    begins = np.cumsum([0, *map(len, shards)])
    lengths = [length for shard in shards for length in shard]
    for number in range(chunks.num_blocks):
        documents = [d for s in order[number * block :][:block] for d in range(begins[s], begins[s + 1])]
        plain = [(d, at, min(most, lengths[d] - at)) for d in documents for at in range(0, lengths[d], most)]
        expected = [plain[at] for at in permutation(len(plain), derive(seed, 2, 3, number, most))]
        assert [tuple(chunk) for chunk in chunks.block(3, number, most).tolist()] == expected
