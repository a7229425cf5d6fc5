"""A fault on one rank of two, under DDP and FSDP2: every rank sees it in the same step, and the report names the rank.

If this breaks, one rank leaves the step while the other waits for it in a collective until the timeout, or NaN from one
rank is in every rank's weights.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from modernbert_train.__main__ import read_run
from modernbert_train.errors import UnstableRun
from modernbert_train.train import session
from modernbert_train.train.step_numbers import squared_gradient
from tests.support.faulty import Fault, at_fault, first_document
from tests.support.gloo import run_ranks
from tests.support.runs import newest
from tests.support.tiny_run import TinyRun

SHORT = (
    "phases.long=null",
    "phases.short.batch_warmup=null",
    "phases.short.microbatch_tokens=128",
    "phases.short.tokens=3000",  # 6 steps of 2 microbatches on each of 2 ranks
    "data.validation=null",
    "checkpoint.interval_steps=2",
    "checkpoint.keep=100",
)
RUNS: list[tuple[str, Fault, tuple[str, ...]]] = [
    (f"{strategy}-{fault.kind}-{policy}", fault, (f"distributed.strategy={strategy}", f"stability.{key}={policy}"))
    for strategy, fault, key, policy in (
        ("ddp", Fault("forward", steps=(4,), microbatch=1, rank=1), "non_finite", "stop"),
        ("ddp", Fault("backward", steps=(4,), microbatch=1, rank=1), "non_finite", "skip"),
        ("fsdp2", Fault("forward", steps=(4,), rank=1, once=True), "non_finite", "roll_back"),
    )
]
# a loss that only one rank sees: without the sum over ranks the others would continue
LATE = ("phases.short.tokens=5500", "stability.spike=skip", "stability.spike_window_batches=8", "stability.max_skips=1")
RUNS.append(("ddp-spike-skip", Fault("spike", steps=(10,), microbatch=1, rank=1), LATE))


def squared_gradient_of_all() -> list[float]:
    """On one rank: the squared gradient of 0..5, whole on both ranks, replicated and sharded on a mesh."""
    found = []
    for shape in (None, (2, 1), (1, 2)):
        gradient = torch.arange(6.0).reshape(3, 2)
        if shape is not None:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
            gradient = distribute_tensor(gradient, mesh, [Replicate(), Shard(0)])
        parameter = nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient
        share = squared_gradient([parameter], num_ranks=2)
        dist.all_reduce(share)
        found.append(share.item())
    return found


def train_all(words: list[str]) -> tuple[list[str], list[float]]:
    """On one rank: every run, one after the other; how each ended."""
    session.joined = lambda *_: nullcontext()  # the test's own process group
    ends = []
    for name, fault, overrides in RUNS:
        with at_fault(fault):
            try:
                session.train(read_run([*words, *overrides, f"name={name}"]))
                ends.append("done")
            except UnstableRun as error:
                ends.append(str(error))
    return ends, squared_gradient_of_all()


def fault_of(folder: Path) -> dict[str, Any]:
    (line,) = (folder / "faults.jsonl").read_text().splitlines()
    return json.loads(line)


@pytest.mark.runs
@pytest.mark.timeout(180)
def test_a_fault_on_one_rank_is_one_decision_of_all(tiny_run: TinyRun, tmp_path: Path) -> None:
    words = tiny_run(*SHORT)
    (ends, squares), other = run_ranks(train_all, 2, words, timeout_seconds=150)
    assert (ends, squares) == other, "ranks ended differently"
    assert squares == pytest.approx([55.0] * 3), "a gradient on several ranks must count once"
    for (name, fault, _), end in zip(RUNS, ends, strict=True):
        folder = tmp_path / "runs" / name
        found = fault_of(folder)
        assert found["step"] == fault.steps[0], name
        (where,) = found["microbatches"]
        assert (where["rank"], where["microbatch"]) == (1, fault.microbatch), name
        if fault.once:
            assert "hardware" in where["place"]
        elif fault.kind == "spike":
            assert "largest gradient in" in where["place"]
            assert where["documents"][0] == first_document([*words, LATE[0]], 10, 1, 1, 2)
        else:
            module = {"forward": "model.layers.2.mlp, forward", "backward": "model.layers.2.mlp.Wo, backward"}
            assert where["place"] == module[fault.kind], name
            assert where["documents"] == [first_document(words, 4, 1, 1, 2)], name
        last = newest(folder)
        assert all(bool(torch.isfinite(tensor).all()) for tensor in last.weights().values()), name
        if name.endswith("stop"):
            assert "rank 1, microbatch 1" in end and last.step == 2
        else:
            assert end == "done" and last.state.tokens >= 3000
        if name.endswith("roll_back"):
            before, after = (newest(folder, step) for step in (2, 4))
            assert (before.step, after.step) == (2, 4)
            for mine, theirs in ((before.weights(), after.weights()), (before.optimizer(), after.optimizer())):
                assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
