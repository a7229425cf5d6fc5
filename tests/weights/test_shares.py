"""Who writes which rows of a checkpoint. A row without a writer is lost, one with two is written for nothing."""

from __future__ import annotations

import pytest
import torch

from modernbert_train.weights.shares import share_of

SHAPES = [(50_368, 768), (768,), (2304, 768), (1,), (), (3, 5), (1152, 1), (20_000,), (7, 20_000)]


@pytest.mark.parametrize(
    ("num_ranks", "writers"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (8, list(range(8))), (8, [0, 1, 2, 5]), (4, [0])]
)
def test_every_row_of_a_replicated_model_has_one_writer_and_all_write_as_much(
    num_ranks: int, writers: list[int]
) -> None:
    written = [0] * num_ranks
    for turn, shape in enumerate(SHAPES * 4):
        tensor = torch.empty(shape, device="meta")
        rows = []
        for rank in range(num_ranks):
            mine = share_of(tensor, turn, rank, writers, num_ranks)
            if mine is not None:
                assert mine.rows > 0 and mine.first == mine.held_before and rank in writers
                rows += range(mine.first, mine.first + mine.rows)
                written[rank] += mine.rows * (tensor[:1].numel() if shape else 1)
        assert sorted(rows) == list(range(shape[0] if shape else 1)), shape
    busy = [count for count in written if count]
    assert len(busy) == len(writers) and max(busy) < 1.02 * min(busy)
