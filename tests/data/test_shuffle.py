"""The order of documents: every one once an epoch, another order each epoch, and any place reachable at once.

If this breaks, a resumed run sees other documents than it would have, or some never.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modernbert_train.data.shuffle import DocumentOrder

Sizes = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(sum)


def walk(order: DocumentOrder, epoch: int) -> list[int]:
    """A whole epoch, block by block."""
    documents: list[int] = []
    while len(documents) < order.num_documents:
        documents += order.documents_from(epoch, len(documents)).tolist()
    return documents


@settings(max_examples=50, deadline=None)
@given(Sizes, st.integers(1, 5), st.integers(0, 2**31 - 1), st.integers(0, 3))
def test_an_epoch_holds_every_document_once(sizes: list[int], block: int, seed: int, epoch: int) -> None:
    order = DocumentOrder(sizes, block, seed)
    assert sorted(walk(order, epoch)) == list(range(sum(sizes)))


@settings(max_examples=50, deadline=None)
@given(Sizes, st.integers(1, 5), st.integers(0, 3))
def test_any_place_is_found_without_walking_there(sizes: list[int], block: int, epoch: int) -> None:
    order = DocumentOrder(sizes, block, seed=1)
    whole = walk(order, epoch)
    for index in range(order.num_documents):
        rest = order.documents_from(epoch, index).tolist()
        assert rest and rest == whole[index : index + len(rest)]


def test_no_more_shards_are_open_than_a_block_holds() -> None:
    """Each block of documents comes from its own few shards, so that a reader can forget the others."""
    sizes = [7, 3, 5, 4, 6, 8, 2]
    order = DocumentOrder(sizes, 3, seed=4)
    shard_of = np.repeat(np.arange(len(sizes)), sizes)
    index, seen = 0, []
    while index < order.num_documents:
        documents = order.documents_from(0, index)
        seen.append(set(shard_of[documents].tolist()))
        index += len(documents)
    assert [len(shards) for shards in seen] == [3, 3, 1]
    assert sum(map(len, seen)) == len(set.union(*seen)) == len(sizes)


def test_documents_of_a_block_are_mixed() -> None:
    order = DocumentOrder([100, 100], 2, seed=4)
    first = np.array(walk(order, 0)[:100])
    assert 30 < (first < 100).sum() < 70  # of the first half, about half comes from each shard
    assert (np.diff(first) != 1).sum() > 90


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [walk(DocumentOrder([10] * 6, 2, seed), epoch) for seed in (1, 2) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


def test_pinned_order_never_changes() -> None:
    """A change here changes the documents of every run that is under way."""
    assert walk(DocumentOrder([3, 4, 2, 3], 2, seed=17), 0) == [3, 10, 5, 9, 4, 11, 6, 2, 0, 1, 8, 7]


@pytest.mark.parametrize("block", [1, 2, 100])
def test_empty_shards_are_passed_over(block: int) -> None:
    assert sorted(walk(DocumentOrder([0, 0, 3, 0, 2, 0], block, seed=5), 0)) == [0, 1, 2, 3, 4]
