"""Composer's shapes around our parts: a ComposerModel, a DataSpec, FSDP2 wrapping. Thin, no ideas of their own.

What the Trainer does with them: a microbatch gives sums, which `loss` divides by the counts of the global batch. So a
step's gradient is that of the means over the global batch, however it was cut into microbatches and ranks. Composer
would weigh microbatches itself; it is told that each weighs 1.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from composer.core import DataSpec, State
from composer.models import ComposerModel
from composer.utils import dist
from composer.utils.parallelism import ParallelismConfig
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from modernbert_train.batch import Batch, Sums, weighted
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.loader import PackedLoader, StepBatch
from modernbert_train.errors import RunError
from modernbert_train.keyed_random import derive
from modernbert_train.models.encoder import OnEncoder
from modernbert_train.ranks.heartbeat import passed
from modernbert_train.train.composer_internals import Sharding


class ComposerObjective(ComposerModel):
    """An objective's module as Composer trains it.

    Args:
        model: forward(batch, figures) gives Sums.
    """

    def __init__(self, model: OnEncoder) -> None:
        super().__init__()
        self.model = model
        units = {*sharded_units(model)}
        vars(model)["fsdp_wrap_fn"] = lambda module: module in units
        self._terms: Mapping[str, float] = {}
        self._counts: Mapping[str, float | Tensor] = {}
        self._step_key: int | None = None
        self._microbatch = 0

    @property
    def idles(self) -> bool:
        """See `OnEncoder`; `replicate` of composer_internals.py asks for it."""
        return self.model.idles

    def begin_step(self, key: int) -> None:
        """Key the dropout of the microbatches that follow by `key` and by their number in the global batch.

        The loader gives every num_ranks-th microbatch to a rank, so a microbatch has the same dropout on any number of
        ranks. Nothing is carried along: a resumed run needs no saved generator, and Composer 0.32.1 would not put one
        back in the middle of an epoch anyway.
        """
        self._step_key, self._microbatch = key, dist.get_global_rank()

    def divide_by(self, counts: Mapping[str, float | Tensor], terms: Mapping[str, float]) -> None:
        """Set what the sums of the step's microbatches are divided by, and the weights of its loss terms.

        Args:
            counts: of each term the mean over ranks, because DDP and FSDP2 divide gradients by the number of ranks.
            terms: of the step's objective: loss term -> weight.
        """
        self._counts, self._terms = counts, terms

    def forward(self, batch: Batch, figures: bool = False) -> Sums:
        if self.training and self._step_key is not None:
            _generator(batch.packed.input_ids_T.device).manual_seed(derive(self._step_key, self._microbatch) >> 1)
            self._microbatch += dist.get_world_size()
        return self.model(batch, figures)

    def loss(self, outputs: Sums, batch: Batch, *args: Any, **kwargs: Any) -> Tensor:
        """What this microbatch adds to the loss of the step, times the number of ranks."""
        return weighted(outputs.losses, self._terms, self._counts)

    def eval_forward(self, batch: Batch, outputs: Sums | None = None) -> Sums:
        return self.forward(batch, figures=True) if outputs is None else outputs


def sharded_units(model: OnEncoder) -> list[nn.Module]:
    """What FSDP2 gathers on its own: each layer. The rest (embeddings, tied decoder, heads) is one more unit, and stays
    whole from the forward to the backward pass; so does a layer that is passed several times, which would be gathered
    each time, and is in use all the while."""
    units = (pair for each in model.encoders for pair in zip(each.layers, each.config.unit_passes, strict=True))
    return [layer for layer, passes in units if passes == 1]


def _generator(device: torch.device) -> torch.Generator:
    """What dropout on a device draws from. torch.manual_seed would see to every kind of device that there might be, and
    take a millisecond."""
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


def adapter_of(model: nn.Module) -> ComposerObjective:
    """What was given to the Trainer, inside the wrapper it may have put around it."""
    adapter = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    assert isinstance(adapter, ComposerObjective)
    return adapter


def inner_model(model: nn.Module) -> OnEncoder:
    """Our model inside Composer's wrappers, whose parameter names are the published ones."""
    return adapter_of(model).model


def step_tokens(state: State) -> tuple[int, int]:
    """Global tokens before and after the step that has just ended."""
    assert state.previous_timestamp is not None
    return state.previous_timestamp.token.value, state.timestamp.token.value


def data_spec(loader: PackedLoader, device: torch.device) -> DataSpec:
    """The loader as Composer reads it: a sample is a row, a token is a token that is not padding."""

    def parts(batch: StepBatch | Batch) -> Sequence[Batch]:
        return batch.microbatches if isinstance(batch, StepBatch) else (batch,)

    def num_tokens(batch: StepBatch | Batch) -> dict[str, int]:
        return {"total": sum(part.num_tokens for part in parts(batch)), "loss_generating": 1}

    return DataSpec(
        dataloader=_Noted(loader),
        microbatch_transforms=lambda batch: batch.to(device, non_blocking=True),
        get_num_samples_in_batch=lambda batch: sum(part.num_rows for part in parts(batch)),
        get_num_tokens_in_batch=num_tokens,
    )


class _Noted:
    """The loader, noting each batch: the other ranks will wait for one that has none, and want to know why."""

    def __init__(self, loader: PackedLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[StepBatch]:
        for batch in self._loader:
            passed("a batch that was read")
            yield batch


def is_sharded(config: RunConfig, num_ranks: int) -> bool:
    """Whether FSDP2, in one group or several, is asked for and there is something to shard."""
    return config.distributed.strategy != "ddp" and num_ranks > 1


def parallelism(config: RunConfig, num_ranks: int) -> ParallelismConfig | None:
    """FSDP2 where asked for and where there is something to shard; Composer wraps in DDP otherwise.

    It must be given as an FSDP2Config object: Composer 0.32.1 ignores the dict key `fsdp2` and trains with DDP.
    """
    if is_sharded(config, num_ranks):
        warnings.filterwarnings("ignore", "FSDP2 Config/APIs are experimental")
        return ParallelismConfig(fsdp2=Sharding(num_ranks, config.distributed.shard_ranks or num_ranks))
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
