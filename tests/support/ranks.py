"""Train and compare runs of several ranks."""

from __future__ import annotations

import os
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from modernbert_train.__main__ import read_run
from modernbert_train.errors import RunError
from tests.support.gloo import HOST
from tests.support.runs import weights

HSDP = ("distributed.strategy=hsdp", "distributed.shard_ranks=2")


def assert_same_weights(folder: Path, expected: Path) -> None:
    found, wanted = weights(folder), weights(expected)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=2e-3, atol=2e-5)


def train_each(runs: list[list[str]], of_meshes: bool = True) -> list[tuple[int, ...]]:
    """Run one after the other on every rank, each with a fresh process group, since `train` closes its own.

    Returns:
        See `meshes`.
    """
    from modernbert_train.train.session import train

    rank, num_ranks, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    for number, words in enumerate([*runs, None]):
        if dist.is_initialized():
            dist.destroy_process_group()
        store = dist.PrefixStore(f"run{number}", dist.TCPStore(HOST, port, is_master=False))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))
        if words is not None:  # the last group is for run_ranks to end
            train(read_run(words))
    return meshes() if of_meshes else []


def meshes() -> list[tuple[int, ...]]:
    """On 4 ranks: the mesh that the weights have when Composer is given one of 2 x 2, and when `parallelism` asks."""
    from composer.core import State
    from composer.devices import DeviceCPU
    from composer.distributed.prepare_distributed import parallelize_composer_model
    from composer.utils.parallelism import FSDP2Config, ParallelismConfig
    from torch.distributed.device_mesh import init_device_mesh

    from modernbert_train.config.schema import DistributedConfig, ModernBertConfig
    from modernbert_train.models.modernbert import ModernBertForMaskedLM
    from modernbert_train.train.adapters import ComposerObjective, assert_sharded, parallelism

    size = ModernBertConfig(vocab_size=64, hidden_size=8, num_layers=1, num_heads=1, intermediate_size=8)
    asked = DistributedConfig(strategy="hsdp", shard_ranks=2)
    ours = parallelism(asked, 4)
    shapes = []
    for config in (ParallelismConfig(fsdp2=FSDP2Config(device_mesh=init_device_mesh("cpu", (2, 2)))), ours):
        model = ComposerObjective(ModernBertForMaskedLM(size))
        state = State(
            model=model, rank_zero_seed=0, run_name="x", device=DeviceCPU(), parallelism_config=config, precision="fp32"
        )
        parallelize_composer_model(model, None, state.fsdp_config)
        parameter = next(model.parameters())
        assert isinstance(parameter, DTensor)
        shapes.append(tuple(parameter.device_mesh.shape))
        if config is ours:
            assert_sharded(model, 2)
        else:
            with pytest.raises(RunError, match=r"shard_ranks=2: not in force; .* is shared by 4 of 4 ranks"):
                assert_sharded(model, 2)
    return shapes


def drop_newest(folder: Path) -> None:
    shutil.rmtree(max((folder / "checkpoints").iterdir()))
