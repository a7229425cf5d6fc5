"""StableAdamW under FSDP2 and HSDP: the same update on any number of ranks.

If this breaks, a run's result depends on how many GPUs it had: clipping by the RMS of a shard is another optimizer.
Every rank gets the same inputs, so the sharded gradient equals one process's and only the optimizer can differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from modernbert_train.optim.groups import decay_groups, weights_of
from modernbert_train.optim.stable_adamw import StableAdamW
from tests.support.gloo import run_ranks

pytestmark = pytest.mark.runs

STEPS = 10


@dataclass
class Outcome:
    """The results of a run: full weights by name, both norms after each step."""

    weights: dict[str, Tensor]
    norms: list[tuple[float, float]]
    smallest_shard: int


def build_model() -> nn.Sequential:
    """Seven and five rows: uneven on 2 ranks; on 4 ranks the last one holds nothing of the last layer."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 5))


def build_optimizer(model: nn.Module) -> StableAdamW:
    return StableAdamW(decay_groups(weights_of(model), 0.02), 5e-3, max_lr=1e-2)


def backward(model: nn.Module, step: int) -> None:
    """A gradient that spikes at steps 3 and 7 in the first output row only, which one rank holds alone."""
    generator = torch.Generator().manual_seed(step)
    inputs, weights = torch.randn(8, 6, generator=generator), torch.randn(8, 5, generator=generator)
    if step in (3, 7):
        weights[:, 0] *= 1e3
    model.zero_grad()
    (model(inputs) * weights).sum().backward()


def train(model: nn.Module, optimizer: StableAdamW) -> Outcome:
    norms = []
    for step in range(STEPS):
        backward(model, step)
        optimizer.step()
        norms.append((optimizer.last_grad_norm.item(), optimizer.last_update_norm.item()))
    full = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    shards = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    weights = {name: param.detach().clone() for name, param in full.items()}
    return Outcome(weights, norms, min(shard.numel() for shard in shards))


def train_sharded(mesh_shape: tuple[int, ...], partly: bool = False) -> Outcome:
    """Shard after the optimizer was built and swap its parameters, as Composer does.

    Args:
        mesh_shape: (shard,) or (replicate, shard).
        partly: leave the first two modules whole on every rank.
    """
    model = build_model()
    optimizer = build_optimizer(model)
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    fully_shard(model[3], mesh=mesh)
    if not partly:
        fully_shard(model, mesh=mesh)
    sharded = dict(model.named_parameters())
    groups = [dict(group) for group in optimizer.param_groups]
    optimizer.param_groups.clear()
    for group in groups:
        optimizer.add_param_group(group | {"params": [sharded[name] for name in group["param_names"]]})
    return train(model, optimizer)


# ranks -> name -> shape of the mesh, and whether a part stays whole
WAYS = {2: {"fsdp": ((2,), False), "partly": ((2,), True)}, 4: {"fsdp": ((4,), False), "hsdp": ((2, 2), False)}}


def on_rank(ranks: int) -> dict[str, Outcome]:
    return {way: train_sharded(*how) for way, how in WAYS[ranks].items()}


@pytest.mark.parametrize("ranks", WAYS)
def test_ranks_equal_one_process(ranks: int) -> None:
    """Whole tensors among sharded ones, and a rank with empty shards, too; in HSDP a sum over replicas would double
    every RMS and norm. Equal on every rank after every step, and bitwise between ranks."""
    model = build_model()
    whole = train(model, build_optimizer(model))
    outcomes = run_ranks(on_rank, ranks, ranks)
    for way in WAYS[ranks]:
        first, *_ = found = [each[way] for each in outcomes]
        assert [each.smallest_shard == 0 for each in found] == [
            (ranks, way, rank) == (4, "fsdp", 3) for rank in range(ranks)
        ]
        torch.testing.assert_close(first.weights, whole.weights, rtol=1e-5, atol=1e-6)
        assert first.norms == [pytest.approx(norms, rel=1e-5) for norms in whole.norms]
        for outcome in found:
            assert outcome.norms == first.norms
            torch.testing.assert_close(outcome.weights, first.weights, rtol=0, atol=0)
