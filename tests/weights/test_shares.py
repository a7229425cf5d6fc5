"""Which rank writes which rows of a checkpoint. A row without a writer is lost, one with two is written twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

from modernbert_train.models.sharding import held_rows, with_rows
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


@contextmanager
def as_rank(rank: int, num_ranks: int) -> Iterator[None]:
    """Pretend to be one of several ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (4,), (2, 2), (2, 3)])
@pytest.mark.parametrize("shape", [(10, 3), (2, 5), (1,), (90, 400), (91,)])
def test_of_a_sharded_tensor_each_rank_writes_rows_that_it_holds(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    """With replicas (HSDP) too; each rank reads back its rows."""
    num_ranks = mesh_shape[0] * (mesh_shape[1] if len(mesh_shape) > 1 else 1)
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    rows: list[int] = []
    for rank in range(num_ranks):
        with as_rank(rank, num_ranks):
            mesh = init_device_mesh("cpu", mesh_shape)
            placements: list[Placement] = [Shard(0)] if len(mesh_shape) == 1 else [Replicate(), Shard(0)]
            tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            first, held = held_rows(tensor)
            assert torch.equal(tensor.to_local(), whole[first : first + held])
            again = with_rows(whole[first : first + held], tensor)
            assert again.shape == tensor.shape and again.stride() == tensor.stride()
            assert torch.equal(again.to_local(), tensor.to_local())
            mine = share_of(tensor, 5, rank, list(range(num_ranks)), num_ranks)
            if mine is not None:
                rows += range(mine.first, mine.first + mine.rows)
                assert torch.equal(
                    tensor.to_local()[mine.held_before : mine.held_before + mine.rows],
                    whole[mine.first : mine.first + mine.rows],
                )
    assert sorted(rows) == list(range(shape[0]))
