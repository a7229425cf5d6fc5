"""Adapters between Composer and our models: a ComposerModel, and the FSDP2 settings."""

from __future__ import annotations

import math
import warnings
from typing import Any

from composer.models import ComposerModel
from composer.utils.parallelism import ParallelismConfig
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from modernbert_train.batch import Batch, Sums
from modernbert_train.config.schema import DistributedConfig
from modernbert_train.errors import RunError
from modernbert_train.models.encoder import OnEncoder
from modernbert_train.models.sharding import sharded_units
from modernbert_train.train.composer_internals import Sharding


class ComposerObjective(ComposerModel):
    """Wrap an objective's module as a ComposerModel.

    Args:
        model: its forward(batch, figures) returns Sums.
    """

    def __init__(self, model: OnEncoder) -> None:
        super().__init__()
        self.model = model
        units = {*sharded_units(model)}
        vars(model)["fsdp_wrap_fn"] = lambda module: module in units

    @property
    def idles(self) -> bool:
        """See `OnEncoder.idles`; read by `replicate` of composer_internals.py."""
        return self.model.idles

    def forward(self, batch: Batch, figures: bool = False) -> Sums:
        return self.model(batch, figures)

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Required by Composer and never called; gradients.py computes the loss."""
        raise NotImplementedError


def adapter_of(model: nn.Module) -> ComposerObjective:
    """Return the ComposerObjective inside the wrapper that the Trainer may have added."""
    adapter = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    assert isinstance(adapter, ComposerObjective)
    return adapter


def inner_model(model: nn.Module) -> OnEncoder:
    """Return our model without Composer's wrappers; its parameter names are the published ones."""
    return adapter_of(model).model


def is_sharded(config: DistributedConfig, num_ranks: int) -> bool:
    """Return True if FSDP2 is configured and there is more than one rank to shard over."""
    return config.strategy != "ddp" and num_ranks > 1


def parallelism(config: DistributedConfig, num_ranks: int) -> ParallelismConfig | None:
    """Return the FSDP2 settings, or None without sharding; Composer then wraps the model in DDP.

    The result must be an FSDP2Config object: Composer 0.32.1 ignores the dict key `fsdp2` and trains with DDP.
    """
    if is_sharded(config, num_ranks):
        warnings.filterwarnings("ignore", "FSDP2 Config/APIs are experimental")
        return ParallelismConfig(fsdp2=Sharding(num_ranks, config.shard_ranks or num_ranks))
    return None


def assert_sharded(model: nn.Module, shard_ranks: int | None) -> None:
    """Check that FSDP2 is active: every unit is sharded and every parameter is a DTensor.

    Args:
        model: as held by the Trainer.
        shard_ranks: ranks that share one copy of the weights; None means all of them.

    Raises:
        RunError: it is not. Composer falls back to DDP silently if it does not understand its arguments.
    """
    from torch.distributed.fsdp import FSDPModule

    units = sharded_units(inner_model(model))
    plain = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if plain or not all(isinstance(unit, FSDPModule) for unit in units):
        raise RunError(
            f"distributed.strategy=fsdp2: not in force; {len(plain)} parameters are whole on every rank. Report this "
            "with the output of `doctor`, or set distributed.strategy=ddp."
        )
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        mesh = parameter.device_mesh
        shards = math.prod(mesh.size(dim) for dim, kind in enumerate(parameter.placements) if not kind.is_replicate())
        if shards != (shard_ranks or mesh.size()):
            raise RunError(
                f"distributed.shard_ranks={shard_ranks}: not in force; {name} is shared by {shards} of {mesh.size()} "
                "ranks. Report this with the output of `doctor`, or set distributed.strategy=fsdp2."
            )
