"""Composer's shapes around our parts: a ComposerModel, a DataSpec, FSDP2 wrapping. Thin, no ideas of their own.

What Composer 0.32.1 does with them: the loss of a microbatch (a mean over its predicted tokens) is weighted by that
microbatch's share of the predicted tokens of the global batch, because `loss_generating` tokens are reported below
and the Trainer accumulates on tokens. So a step's gradient is the mean over the global batch's predicted tokens,
however it was cut into microbatches and ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from composer.core import DataSpec
from composer.models import ComposerModel
from composer.utils.parallelism import FSDP2Config, ParallelismConfig
from torch import Tensor, nn

from modernbert_train.batch import Batch
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.loader import PackedLoader, StepBatch
from modernbert_train.errors import RunError
from modernbert_train.models.layers import EncoderLayer
from modernbert_train.models.modernbert import MlmOutput, ModernBertForMaskedLM


class ComposerMaskedLM(ComposerModel):
    """A masked-language model as Composer trains it."""

    def __init__(self, model: ModernBertForMaskedLM) -> None:
        super().__init__()
        self.model = model
        # FSDP2 units: each layer on its own, and the rest (embeddings, tied decoder, head) together
        vars(model)["fsdp_wrap_fn"] = lambda module: isinstance(module, EncoderLayer)

    def forward(self, batch: Batch) -> MlmOutput:
        return self.model(batch)

    def loss(self, outputs: MlmOutput, batch: Batch, *args: Any, **kwargs: Any) -> Tensor:
        return outputs.loss

    def eval_forward(self, batch: Batch, outputs: MlmOutput | None = None) -> MlmOutput:
        return self.forward(batch) if outputs is None else outputs


def inner_model(model: nn.Module) -> ModernBertForMaskedLM:
    """Our model inside Composer's wrappers, whose parameter names are the published ones."""
    adapter = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    assert isinstance(adapter, ComposerMaskedLM)
    return adapter.model


def data_spec(loader: PackedLoader, device: torch.device) -> DataSpec:
    """The loader as Composer reads it: a sample is a row, a token is a token that is not padding."""

    def parts(batch: StepBatch | Batch) -> Sequence[Batch]:
        return batch.microbatches if isinstance(batch, StepBatch) else (batch,)

    def num_tokens(batch: StepBatch | Batch) -> dict[str, int]:
        return {
            "total": sum(part.num_tokens for part in parts(batch)),
            "loss_generating": sum(part.num_predicted for part in parts(batch)),
        }

    return DataSpec(
        dataloader=loader,
        split_batch=lambda batch, _: parts(batch),
        microbatch_transforms=lambda batch: batch.to(device, non_blocking=True),
        get_num_samples_in_batch=lambda batch: sum(part.num_rows for part in parts(batch)),
        get_num_tokens_in_batch=num_tokens,
    )


def parallelism(config: RunConfig, num_ranks: int) -> ParallelismConfig | None:
    """FSDP2 where asked for and where there is something to shard; Composer wraps in DDP otherwise.

    It must be given as an FSDP2Config object: Composer 0.32.1 ignores the dict key `fsdp2` and trains with DDP.
    """
    if config.distributed.strategy == "fsdp2" and num_ranks > 1:
        warnings.filterwarnings("ignore", "FSDP2 Config/APIs are experimental")
        return ParallelismConfig(fsdp2=FSDP2Config(state_dict_type="full"))
    return None


def assert_sharded(model: nn.Module) -> None:
    """Make sure that FSDP2 is really on: every layer is a unit and every parameter is a DTensor.

    Raises:
        RunError: it is not; Composer falls back to DDP in silence when it does not understand what it is given.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    layers = [module for module in model.modules() if isinstance(module, EncoderLayer)]
    plain = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if plain or not layers or not all(isinstance(layer, FSDPModule) for layer in layers):
        raise RunError(
            f"distributed.strategy=fsdp2: not in force; {len(plain)} parameters are whole on every rank. Report this "
            "with the output of `doctor`, or set distributed.strategy=ddp."
        )
