"""Composer's shapes around our parts: a ComposerModel, FSDP2 wrapping. Thin, no ideas of their own."""

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
    """An objective's module as Composer holds it.

    Args:
        model: forward(batch, figures) gives Sums.
    """

    def __init__(self, model: OnEncoder) -> None:
        super().__init__()
        self.model = model
        units = {*sharded_units(model)}
        vars(model)["fsdp_wrap_fn"] = lambda module: module in units

    @property
    def idles(self) -> bool:
        """See `OnEncoder`; `replicate` of composer_internals.py asks for it."""
        return self.model.idles

    def forward(self, batch: Batch, figures: bool = False) -> Sums:
        return self.model(batch, figures)

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Composer wants one; the step has its own (gradients.py)."""
        raise NotImplementedError


def adapter_of(model: nn.Module) -> ComposerObjective:
    """What was given to the Trainer, inside the wrapper it may have put around it."""
    adapter = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    assert isinstance(adapter, ComposerObjective)
    return adapter


def inner_model(model: nn.Module) -> OnEncoder:
    """Our model inside Composer's wrappers, whose parameter names are the published ones."""
    return adapter_of(model).model


def is_sharded(config: DistributedConfig, num_ranks: int) -> bool:
    """Whether FSDP2, in one group or several, is asked for and there is something to shard."""
    return config.strategy != "ddp" and num_ranks > 1


def parallelism(config: DistributedConfig, num_ranks: int) -> ParallelismConfig | None:
    """FSDP2 where asked for and where there is something to shard; Composer wraps in DDP otherwise.

    It must be given as an FSDP2Config object: Composer 0.32.1 ignores the dict key `fsdp2` and trains with DDP.
    """
    if is_sharded(config, num_ranks):
        warnings.filterwarnings("ignore", "FSDP2 Config/APIs are experimental")
        return ParallelismConfig(fsdp2=Sharding(num_ranks, config.shard_ranks or num_ranks))
    return None


def assert_sharded(model: nn.Module, shard_ranks: int | None) -> None:
    """Make sure that FSDP2 is really on: its units are units and every parameter is a DTensor.

    Args:
        model: as the Trainer holds it.
        shard_ranks: ranks that share one copy of the weights; None is all of them.

    Raises:
        RunError: it is not; Composer falls back to DDP in silence when it does not understand what it is given.
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
