"""StableAdamW under FSDP2 and HSDP: the same update on any number of ranks.

If this breaks, a run's result depends on how many GPUs it had: clipping by the RMS of a shard is another optimizer.
Every rank gets the same inputs, so the sharded gradient equals one process's and only the optimizer can differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
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
    reduces: list[int]  # sizes of the groups of the all-reduces inside the optimizer
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
    norms, reduces = [], []
    for step in range(STEPS):
        backward(model, step)
        with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
            optimizer.step()
        reduces += [call.kwargs["group"].size() for call in reduce.call_args_list]
        norms.append((optimizer.last_grad_norm.item(), optimizer.last_update_norm.item()))
    full = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    shards = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    weights = {name: param.detach().clone() for name, param in full.items()}
    return Outcome(weights, norms, reduces, min(shard.numel() for shard in shards))


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


def difference(a: Outcome, b: Outcome) -> float:
    assert a.weights.keys() == b.weights.keys()
    return max((a.weights[name] - b.weights[name]).abs().max().item() for name in a.weights)


def on_two_ranks() -> dict[str, Outcome]:
    return {"fsdp": train_sharded((2,)), "partly": train_sharded((2,), partly=True)}


def on_four_ranks() -> dict[str, Outcome]:
    return {"fsdp": train_sharded((4,)), "hsdp": train_sharded((2, 2))}


@pytest.fixture(scope="module")
def whole() -> Outcome:
    model = build_model()
    return train(model, build_optimizer(model))


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Outcome]]:
    return run_ranks(on_two_ranks, 2)


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, Outcome]]:
    return run_ranks(on_four_ranks, 4)


def assert_same_run(sharded: list[Outcome], whole: Outcome) -> None:
    """Equal weights, and on every rank equal norms after every step; bitwise equal between ranks."""
    first = sharded[0]
    for name, weight in whole.weights.items():
        torch.testing.assert_close(first.weights[name], weight, rtol=1e-5, atol=1e-6)
    for outcome in sharded:
        assert outcome.norms == first.norms
        assert difference(outcome, first) == 0.0
    assert first.norms == [pytest.approx(norms, rel=1e-5) for norms in whole.norms]


@pytest.mark.parametrize(("ranks", "way"), [(2, "fsdp"), (2, "partly"), (4, "fsdp"), (4, "hsdp")])
def test_ranks_equal_one_process(ranks: int, way: str, request: pytest.FixtureRequest, whole: Outcome) -> None:
    """Whole tensors among sharded ones, and a rank with empty shards, too; in HSDP a sum over replicas would double
    every RMS and norm."""
    found = [outcomes[way] for outcomes in request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[ranks])]
    assert [each.smallest_shard == 0 for each in found] == [
        (ranks, way, rank) == (4, "fsdp", 3) for rank in range(ranks)
    ]
    assert_same_run(found, whole)


def test_a_step_communicates_once_and_only_between_shards(
    two_ranks: list[dict[str, Outcome]], four_ranks: list[dict[str, Outcome]], whole: Outcome
) -> None:
    assert whole.reduces == []
    for outcome, size in (
        (two_ranks[0]["fsdp"], 2),
        (two_ranks[0]["partly"], 2),
        (four_ranks[0]["fsdp"], 4),
        (four_ranks[0]["hsdp"], 2),
    ):
        assert outcome.reduces == [size] * STEPS
