"""Checkpoints that several ranks write and others read: whole, the same bits, and no whole copy of a sharded one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from modernbert_train.checkpoints import saver as module
from modernbert_train.checkpoints.checkpoint import newest_valid, verify
from modernbert_train.checkpoints.saver import Saver, Snapshot, ranks_that_see
from modernbert_train.config.load import to_yaml
from modernbert_train.core.tensor_files import StoredTensors
from modernbert_train.errors import ConfigError, RunError
from modernbert_train.models.modernbert import ModernBertForMaskedLM
from modernbert_train.models.sharding import like
from modernbert_train.weights.gather import load_optimizer, load_weights
from modernbert_train.weights.shares import Copier
from tests.support.gloo import run_ranks
from tests.support.small_checkpoint import CONFIG, state_of

pytestmark = [pytest.mark.runs, pytest.mark.timeout(200)]


def trained(strategy: str, values: dict[str, Tensor] | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with moments under a strategy; of `values`, or else of nothing."""
    model = ModernBertForMaskedLM(CONFIG.model)
    if strategy != "ddp":
        ranks = dist.get_world_size()
        shape, names = ((2, ranks // 2), ("copy", "shard")) if strategy == "hsdp" else ((ranks,), ("shard",))
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    optimizer = torch.optim.AdamW(model.parameters())
    for name, parameter in model.named_parameters():
        whole = torch.zeros(parameter.shape) if values is None else values[name]
        with torch.no_grad():
            parameter.copy_(like(whole, parameter))
        if values is not None:
            optimizer.state[parameter] = {
                "step": torch.tensor(3.0),
                "exp_avg": like(whole / 2, parameter),
                "exp_avg_sq": like(whole**2, parameter),
            }
    return model, optimizer


def values() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(5)
    return {n: torch.randn(p.shape, generator=draw) for n, p in ModernBertForMaskedLM(CONFIG.model).named_parameters()}


def snapshot(copier: Copier, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Snapshot:
    share, needed = copier.copy(model, optimizer)
    return Snapshot(step, share, copier.wait, needed, state_of(step).as_json(), to_yaml(CONFIG), False, False)


def save_under(strategy: str, folder: Path) -> tuple[int, int]:
    """Return the bytes that this rank has written, and those of all."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    writers = ranks_that_see(folder)
    copier, saver = Copier(rank, writers, ranks), Saver(folder, 3, writers, 30.0)
    model, optimizer = trained(strategy, values())
    copier.check(model)
    taken = snapshot(copier, model, optimizer, 7)
    saver.start(taken)
    saver.wait()
    saver.start(snapshot(copier, model, optimizer, 8))
    saver.wait()
    return taken.share.bytes, taken.total_bytes


def load_under(strategy: str, folder: Path) -> int:
    """Check this rank's part of a loaded state; return the bytes it has read."""
    read = 0
    rows, whole = StoredTensors.rows, StoredTensors.__getitem__

    def counted_rows(self: StoredTensors, *args: Any) -> Tensor:
        nonlocal read
        found = rows(self, *args)
        read += found.nbytes
        return found

    def counted_whole(self: StoredTensors, name: str) -> Tensor:
        nonlocal read
        found = whole(self, name)
        read += found.nbytes if len(self._pieces[name]) == 1 else 0
        return found

    StoredTensors.rows, StoredTensors.__getitem__ = counted_rows, counted_whole  # type: ignore[method-assign]
    model, optimizer = trained(strategy)
    checkpoint = verify(folder / "step-00000008")
    load_weights(model, checkpoint.stored_weights())
    load_optimizer(model, optimizer, checkpoint.stored_optimizer())
    wanted_model, wanted = trained(strategy, values())
    for one, other in zip(model.parameters(), wanted_model.parameters(), strict=True):
        here, there = optimizer.state[one], wanted.state[other]
        for found, expected in ((one, other), *((here[key], there[key]) for key in there)):
            assert type(found) is type(expected) and found.shape == expected.shape
            local, right = (t.to_local() if hasattr(t, "to_local") else t for t in (found, expected))
            assert torch.equal(local, right)
    return read


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("strategy", "ranks", "then"),
    [
        ("ddp", 2, ("hsdp", 4)),
        ("fsdp2", 3, ("fsdp2", 2)),
        pytest.param("hsdp", 4, ("ddp", 1), marks=pytest.mark.slow),
    ],
)
def test_what_some_ranks_write_others_read(tmp_path: Path, strategy: str, ranks: int, then: tuple[str, int]) -> None:
    """The same bits, by each rank the rows that it holds; layers have 12 rows and fewer, so that shards are uneven."""
    written = run_ranks(save_under, ranks, strategy, tmp_path)
    total = written[0][1]
    assert sum(own for own, _ in written) == total  # each row once
    if strategy == "fsdp2":
        assert max(own for own, _ in written) < 0.6 * total
    found, passed_over = newest_valid(tmp_path)
    assert found is not None and found.step == 8 and passed_over == []
    assert len(found.weight_files) == ranks
    expected = values()
    torch.testing.assert_close(found.weights(), expected, rtol=0, atol=0)
    for name, tensor in expected.items():
        assert torch.equal(found.optimizer()[f"exp_avg/{name}"], tensor / 2), name
    other, number = then
    whole = 3 * sum(tensor.nbytes for tensor in expected.values())
    for read in run_ranks(load_under, number, other, tmp_path):
        assert other == "ddp" or read < 0.8 * whole


def one_fails(folder: Path, how: str) -> tuple[str, str, list[str]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    failed: list[str] = []
    copier = Copier(rank, [0, 1], ranks)
    saver = Saver(folder, 3, [0, 1], 3.0 if how == "late" else 30.0, lambda: failed.append("failed"))
    model, optimizer = trained("ddp", values())
    saver.start(snapshot(copier, model, optimizer, 1))
    saver.wait()
    real = module.write_part

    def bad(*args: Any) -> Any:
        if how == "late":
            time.sleep(5.0)
        if how == "full":
            raise OSError(28, "No space left on device")
        return real(*args)

    if how == "nan" and rank == 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
    elif (rank == 0) == (how == "first"):
        how = "full" if how == "first" else how
        module.write_part = bad
    saver.start(snapshot(copier, model, optimizer, 2))
    try:
        saver.wait()
    except RunError as error:
        return type(error).__name__, str(error), failed
    return "", "", failed


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("full", "StorageError", "step-00000002: cannot write the checkpoint (No space left on device)"),
        ("first", "StorageError", "step-00000002: cannot write the checkpoint (No space left on device)"),
        ("late", "StorageError", "rank 1 has sent nothing for"),
        ("nan", "UnstableRun", "weights or moments are not finite"),
    ],
)
def test_where_one_rank_fails_all_have_its_error(tmp_path: Path, how: str, kind: str, words: str) -> None:
    """And the checkpoint before is the newest, without a neighbour that could pass for one."""
    for found, text, failed in run_ranks(one_fails, 2, tmp_path, how):
        assert found == kind and words in text and failed == ["failed"]
    newest, passed_over = newest_valid(tmp_path)
    assert newest is not None and newest.step == 1 and passed_over == []


def alone_before(folder: Path) -> str:
    """Of two ranks only the first sees the folder."""
    here = folder / str(dist.get_rank())
    here.mkdir()
    writers = ranks_that_see(here)
    copier = Copier(dist.get_rank(), writers, 2)
    copier.check(trained("ddp")[0])
    if dist.get_rank() == 0:
        return str(writers)
    with pytest.raises(ConfigError, match="Put runs_folder on a file system that all machines share"):
        copier.check(_sharded_on(1))
    return str(writers)


def _sharded_on(rank: int) -> nn.Module:
    """A model that this rank alone holds, as far as `holders` can tell."""
    from torch.distributed.tensor import DeviceMesh, DTensor, Shard

    mesh = DeviceMesh("cpu", [rank], _init_backend=False)
    model = nn.Module()
    model.weight = nn.Parameter(DTensor.from_local(torch.zeros(2, 2), mesh, [Shard(0)], run_check=False))
    return model


def test_ranks_that_do_not_see_the_folder_leave_writing_to_those_that_do(tmp_path: Path) -> None:
    assert run_ranks(alone_before, 2, tmp_path) == ["[0]", "[0]"]
    assert not [path.name for path in tmp_path.glob("*/*")]
