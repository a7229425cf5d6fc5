"""Base classes of all encoders: packed sequences in, hidden states out, and what an objective builds on them.

Shape legend: T packed tokens, D model width, V vocabulary, E width of the embedding.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modernbert_train.batch import Batch, Packed, Sums
from modernbert_train.config.schema import ComputeConfig, ModelConfig
from modernbert_train.models.compiler import compile_regions, region, set_search, set_up_compiler
from modernbert_train.models.layers import rotary_of
from modernbert_train.models.lookup import take_rows

GELU = {"gelu": "none", "gelu_tanh": "tanh"}  # activation -> torch's name for how it is approximated


class Encoder(nn.Module):
    """An encoder on packed buffers. One file an architecture, the whole of it, top to bottom.

    Attributes:
        config: the architecture.
        compute: how it is computed, the loss too.
        embeddings: called, it gives the first hidden states; another encoder may share it, or have a projection of it.
        layers: the units that are compiled and recomputed, each once, however many layers share it; those that a token
            passes through once (`ModelConfig.unit_passes`) are sharded each on its own.
        tables: of `embeddings`, those that every token looks up by what it is and where: nn.Embedding modules.
    """

    config: Any
    compute: ComputeConfig = ComputeConfig()
    embeddings: nn.Module
    layers: nn.ModuleList
    tables: ClassVar[tuple[str, ...]] = ("tok_embeddings",)

    @abstractmethod
    def forward(self, packed: Packed, positions_M: Tensor | None = None) -> Tensor:
        """Final hidden states, hidden_TD, of every token (pads too). Nothing is read back from the device.

        Args:
            packed: the sequences.
            positions_M: places in the packed buffer; if given, return the states of these tokens alone, hidden_MD.

        Raises:
            ConfigError: compute.attention names a kernel that cannot serve this device, precision or order.
        """

    def leave(self, hidden_TD: Tensor, positions_M: Tensor | None) -> Tensor:
        """Final hidden states from those of the last layer: hidden_TD, or at some positions hidden_MD."""
        return hidden_TD if positions_M is None else take_rows(hidden_TD, positions_M)

    @region
    def rotary_of(self, position_ids_T: Tensor, inverse_E: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See `layers.rotary_of`. The frequencies are an argument: another base of a phase compiles nothing."""
        return rotary_of(position_ids_T, inverse_E, dtype)

    def embedding(self) -> nn.Parameter:
        """[V, E], what a decoder is tied to; its name is embeddings.tok_embeddings.weight, as weights/ knows it."""
        return self.embeddings.get_parameter("tok_embeddings.weight")

    @abstractmethod
    def prediction_head(self) -> nn.Module:
        """What stands between a hidden state and the decoder, new: [M, D] -> [M, E]."""

    def token_head(self) -> nn.Module:
        """What stands between a hidden state and a class of its token, new: [T, D] -> [T, D]."""
        return TokenHead(self.config.hidden_size)

    def token_states(self, hidden_TD: Tensor, packed: Packed) -> Tensor:
        """What that head reads of final hidden states: them."""
        return hidden_TD

    def set_phase(self, model: Any) -> None:
        """Go on with the architecture as it is in a phase: other values of its `phased` fields; before every step."""
        self.config = model
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = model.dropout


class TokenHead(nn.Module):
    """gelu(dense(h)), with a bias.

    Args:
        width: D.
        approximate: torch's name for how GELU is.
    """

    def __init__(self, width: int, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate
        self.dense = nn.Linear(width, width)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        return F.gelu(self.dense(hidden_TD), approximate=self.approximate)


class OnEncoder(nn.Module):
    """An encoder with what an objective trains on it. Fresh weights are meaningless until `models.init.initialize`.

    Args:
        encoder: of any architecture.

    Attributes:
        config: the encoder's.
        model: the encoder.
        idles: whether a batch may leave parameters without a gradient, the same on all ranks; see
            `ObjectiveConfig.idle_heads`.
    """

    idles: ClassVar[bool] = False

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.config = encoder.config
        self.model = encoder
        # an encoder of a plugin may return the states of every token alone
        self._takes_positions = "positions_M" in inspect.signature(encoder.forward).parameters

    @classmethod
    def build(cls, encoder: Encoder, objective: Any, another: Callable[[ModelConfig], Encoder]) -> Self:
        """What an objective trains on an encoder; `another` makes further ones."""
        return cls(encoder, z_loss=objective.z_loss)  # type: ignore[call-arg]

    @classmethod
    def alone(cls, encoder: Encoder) -> OnEncoder:
        """The part of it that stands on one encoder, which formats of weights may have a place for."""
        return cls(encoder)

    def forward(self, batch: Batch, figures: bool = False) -> Sums:
        """Sums of a microbatch. Nothing is read back from the device.

        Args:
            batch: on the model's device.
            figures: in the plain way, with figures.
        """
        raise NotImplementedError

    @property
    def encoders(self) -> list[Encoder]:
        """All that there are, this one first."""
        return [self.model]

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Within, the backward pass recomputes each layer (activation checkpointing), whatever the run asks for."""
        before = [encoder.compute for encoder in self.encoders]
        for encoder, compute in zip(self.encoders, before, strict=True):
            encoder.compute = replace(compute, activation_checkpointing=True)
        try:
            yield
        finally:
            for encoder, compute in zip(self.encoders, before, strict=True):
                encoder.compute = compute

    def set_phase(self, model: Any) -> None:
        """Go on with the architecture as it is in a phase; before every step."""
        self.config = model
        self.model.set_phase(model)

    def compile_layers(self, **options: Any) -> None:
        """torch.compile each layer, and the regions around them, in place; parameter names stay. Call it once, before
        sharding.

        Shapes are static within a phase, whatever the documents, so each (kind of layer, train or eval, shape) is one
        graph: first, local and global layers make 6 for each shape, and each region 2. A run that asks for more than
        `MOST_GRAPHS` ends with torch's FailOnRecompileLimitHit, which says what changes.

        Args:
            options: for torch.compile, such as mode="max-autotune-no-cudagraphs".
        """
        set_up_compiler()
        set_search(self.model.compute.search)
        for layer in self.model.layers:
            layer.compile(dynamic=False, **options)
        compile_regions(self.model, **options)
        self.compile_heads(**options)

    def compile_heads(self, **options: Any) -> None:
        """torch.compile the regions of the heads and losses; see `compile_layers`."""
        compile_regions(self, **options)

    def encode(self, packed: Packed, positions_M: Tensor | None = None) -> Tensor:
        """Final hidden states, hidden_TD, of every token (pad tokens too); at positions, if given, of those alone.

        Under FSDP2 make it an entry first: torch.distributed.fsdp.register_fsdp_forward_method(model, "encode").
        """
        if positions_M is None:
            hidden: Tensor = self.model(packed)
            return hidden
        if self._takes_positions:
            chosen: Tensor = self.model(packed, positions_M)
            return chosen
        return take_rows(self.model(packed), positions_M)
