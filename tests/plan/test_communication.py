"""What GPUs send: calls and bytes of real ranks, and times worked by hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from modernbert_train.config.schema import ModelConfig
from modernbert_train.models.modernbert import ModernBertForMaskedLM
from modernbert_train.plan.communication import Transfer, exchange, transfer_seconds, transfers
from modernbert_train.plan.gpus import Gpu
from modernbert_train.plan.memory import Strategy
from modernbert_train.plan.parameters import count_parameters
from tests.distributed.gloo import run_ranks
from tests.plan.batches import make_batch

TINY = ModelConfig(
    vocab_size=512, hidden_size=32, num_layers=4, num_heads=2, intermediate_size=48, attention_out_dropout=0.0
)
MICROBATCHES = 2
TWO: list[tuple[Strategy, int]] = [("ddp", 1), ("fsdp2", 2)]  # strategy, ranks that share the weights
FOUR: list[tuple[Strategy, int]] = [("ddp", 1), ("fsdp2", 4), ("hsdp", 2)]
# 1 GB/s after the share that links reach, so that seconds are gigabytes; no time for hops is left out
SLOW = Gpu("test", 1e12, 1, 1e12, node_link=1.25e9, network_link=0.125e9, price=1.0)


def collectives(step: Callable[[], None]) -> dict[str, tuple[int, int]]:
    """Kind of collective -> calls, and elements of the whole tensors, as torch's profiler saw them."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as record:
        step()
    found: dict[str, list[int]] = {}
    reducing = False
    for event in record.events():
        shapes = event.input_shapes
        if event.name == "c10d::_allgather_base_":
            found.setdefault("all_gather", []).append(shapes[0][0])
        elif event.name == "c10d::_reduce_scatter_base_":
            found.setdefault("reduce_scatter", []).append(shapes[1][0])
        elif event.name == "gloo:all_reduce" and reducing:  # gloo makes a reduce-scatter of one too
            found.setdefault("all_reduce", []).append(shapes[0][0])
        reducing = event.name == "c10d::allreduce_" or (reducing and event.name != "gloo:all_reduce")
    return {kind: (len(sizes), sum(sizes)) for kind, sizes in found.items()}


def counted_steps(strategies: list[tuple[Strategy, int]]) -> list[dict[str, tuple[int, int]]]:
    """One step of two microbatches on each rank, under each strategy."""
    batch, ranks = make_batch([40, 24], 19), dist.get_world_size()
    out = []
    for strategy, shards in strategies:
        model = ModernBertForMaskedLM(TINY)
        wrapped: nn.Module = model
        if strategy == "ddp":
            wrapped = DistributedDataParallel(model)
        else:
            shape = (ranks,) if shards == ranks else (ranks // shards, shards)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)

        def step(wrapped: nn.Module = wrapped) -> None:
            for index in range(MICROBATCHES):
                last = index + 1 == MICROBATCHES
                quiet = isinstance(wrapped, DistributedDataParallel) and not last
                with wrapped.no_sync() if quiet else nullcontext():
                    wrapped(batch).loss.backward()

        out.append(collectives(step))
    return out


@pytest.mark.parametrize(
    ("ranks", "strategies"), [(2, TWO), pytest.param(4, FOUR, marks=pytest.mark.slow)], ids=["2 ranks", "4 ranks"]
)
def test_real_ranks_send_what_is_said(ranks: int, strategies: list[tuple[Strategy, int]]) -> None:
    """As many calls, and as many numbers but for the padding of shards that do not divide evenly."""
    (counted, *_) = run_ranks(counted_steps, ranks, strategies)
    for (strategy, shards), found in zip(strategies, counted, strict=True):
        counts = count_parameters(TINY)
        parts = transfers(
            strategy, counts, num_layers=TINY.num_layers, bf16=False, ranks=ranks, shards=shards, per_node=8
        )
        assert {part.kind for part in parts} == found.keys(), strategy
        for kind, (calls, elements) in found.items():
            same = [part for part in parts if part.kind == kind]
            times = [MICROBATCHES if part.every_microbatch else 1 for part in same]
            assert sum(n * part.calls for n, part in zip(times, same, strict=True)) == calls, (strategy, kind)
            payload = sum(n * part.payload for n, part in zip(times, same, strict=True))
            assert payload == pytest.approx(4 * elements, rel=0.03), (strategy, kind)


def gb(kind: Any, inside: int, nodes: int, payload: float = 1e9) -> Transfer:
    return Transfer(kind, inside, nodes, "backward", int(payload), 1, False)


@pytest.mark.parametrize(
    ("transfer", "seconds"),
    [
        (gb("all_gather", 8, 1), 7 / 8),
        (gb("reduce_scatter", 4, 1), 3 / 4),
        (gb("all_reduce", 8, 1), 2 * 7 / 8),
        (gb("all_reduce", 1, 1), 0.0),
        (gb("all_gather", 8, 2), 15 / 16),  # 8 cards share the border
        (gb("all_reduce", 1, 4), 2 * 3 / 4 / 0.1),  # one card of each node: the network alone
        (gb("all_gather", 1, 2), 1 / 2 / 0.1),
    ],
)
def test_times_worked_by_hand(transfer: Transfer, seconds: float) -> None:
    assert transfer_seconds(transfer, SLOW) == pytest.approx(seconds, abs=2e-4)


def test_waiting_grows_with_ranks_for_rings_and_with_their_logarithm_for_trees() -> None:
    """Why sharding over a thousand GPUs is slow even when there is little to send."""
    ring = [transfer_seconds(gb("all_gather", 8, nodes, 0), SLOW) for nodes in (1, 16, 128)]
    tree = [transfer_seconds(gb("all_reduce", 8, nodes, 0), SLOW) for nodes in (1, 16, 128)]
    assert ring[2] > 7 * ring[1] > 49 * ring[0]
    assert tree[2] - tree[1] == pytest.approx(2 * 3 * 8e-6)


def test_only_what_the_pass_cannot_hide_is_exposed() -> None:
    parts = transfers("ddp", count_parameters(ModelConfig()), num_layers=22, bf16=True, ranks=8, shards=1, per_node=8)
    took = 2 * 7 / 8 * 4 * 149_655_232 / 1e9
    slow = exchange(parts, SLOW, microbatch_seconds=0.3, microbatches=4)
    assert slow.payload == 4 * 149_655_232
    assert slow.seconds == pytest.approx(took, rel=0.01)
    assert slow.exposed == pytest.approx(took - 0.2, rel=0.01)  # two thirds of 0.3 s go backward, once
    fast = exchange(parts, SLOW, microbatch_seconds=30.0, microbatches=4)
    assert fast.exposed == pytest.approx(took / parts[0].calls, rel=0.01)  # the last bucket has nothing to hide behind


def test_sharding_sends_in_every_microbatch() -> None:
    counts = count_parameters(ModelConfig())
    parts = transfers("fsdp2", counts, num_layers=22, bf16=True, ranks=8, shards=8, per_node=8)
    one, four = (exchange(parts, SLOW, microbatch_seconds=0.3, microbatches=n) for n in (1, 4))
    assert one.payload == 2 * counts.total + 2 * counts.layers + 4 * counts.total
    assert (four.payload, four.exposed) == (4 * one.payload, pytest.approx(4 * one.exposed))
