"""Base classes of all encoders (packed sequences in, hidden states out) and of the models that objectives train.

Shape legend: T packed tokens, M positions, D model width, V vocabulary, E width of the embedding.
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
from modernbert_train.models.layers import rotary_of, scaled_frequencies
from modernbert_train.models.lookup import take_rows

GELU = {"gelu": "none", "gelu_tanh": "tanh"}  # activation -> `approximate` of torch's GELU


class Encoder(nn.Module):
    """Base class of encoders on packed buffers. Each architecture is one file that reads from top to bottom.

    Attributes:
        config: the architecture.
        compute: kernels and recomputation, for the encoder and for the loss.
        embeddings: module that returns the first hidden states; another encoder may share or project it.
        layers: the units that are compiled and recomputed. A unit that several layers share is listed once; FSDP2
            shards those that a token passes through once (`ModelConfig.unit_passes`).
        tables: names of the nn.Embedding modules in `embeddings` that every token looks up (by token id or position).
    """

    config: Any
    compute: ComputeConfig = ComputeConfig()
    embeddings: nn.Module
    layers: nn.ModuleList
    tables: ClassVar[tuple[str, ...]] = ("tok_embeddings",)

    @abstractmethod
    def forward(self, packed: Packed, positions_M: Tensor | None = None) -> Tensor:
        """Return the final hidden states of every token (pads too), hidden_TD, without a host sync.

        Args:
            packed: the sequences.
            positions_M: positions in the packed buffer; if given, return the states of these tokens only, hidden_MD.

        Raises:
            ConfigError: compute.attention names a kernel that does not support this device, precision or order.
        """

    def leave(self, hidden_TD: Tensor, positions_M: Tensor | None) -> Tensor:
        """Turn the last layer's output into final hidden states: hidden_TD, or hidden_MD at the given positions."""
        return hidden_TD if positions_M is None else take_rows(hidden_TD, positions_M)

    @region
    def rotary_of(
        self, position_ids_T: Tensor, inverse_E: Tensor, dtype: torch.dtype, table_factor: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Call `layers.rotary_of`. Frequencies are an argument, so another RoPE base does not recompile."""
        return rotary_of(position_ids_T, inverse_E, dtype, table_factor)

    def rotary(self, position_ids_T: Tensor, dtype: torch.dtype) -> dict[bool, tuple[Tensor, Tensor]]:
        """Return the tables of global (True) and local (False) layers, from the current phase's RoPE bases.

        For encoders with a `RotaryConfig`.
        """
        tables = {}
        for is_global in self.config.thetas:
            inverse_E, factor = scaled_frequencies(self.config, is_global, position_ids_T.device)
            tables[is_global] = self.rotary_of(position_ids_T, inverse_E, dtype, factor)
        return tables

    def embedding(self) -> nn.Parameter:
        """Return the token embedding [V, E] that the decoder is tied to: embeddings.tok_embeddings.weight."""
        return self.embeddings.get_parameter("tok_embeddings.weight")

    @abstractmethod
    def prediction_head(self) -> nn.Module:
        """Create the head between hidden states and the decoder: [M, D] -> [M, E]."""

    def token_head(self) -> nn.Module:
        """Create the head between hidden states and a classifier of tokens: [T, D] -> [T, D]."""
        return TokenHead(self.config.hidden_size)

    def token_states(self, hidden_TD: Tensor, packed: Packed) -> Tensor:
        """Return the input of the token head: the final hidden states."""
        return hidden_TD

    def set_phase(self, model: Any) -> None:
        """Switch to a phase's values of the `phased` fields; called before every step."""
        self.config = model
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = model.dropout


class TokenHead(nn.Module):
    """gelu(dense(h)), with a bias.

    Args:
        width: D.
        approximate: torch's name of the GELU approximation.
    """

    def __init__(self, width: int, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate
        self.dense = nn.Linear(width, width)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        return F.gelu(self.dense(hidden_TD), approximate=self.approximate)


class OnEncoder(nn.Module):
    """Base class of an encoder with the heads of an objective. `models.init.initialize` draws its weights.

    Args:
        encoder: of any architecture.

    Attributes:
        config: the encoder's.
        model: the encoder.
        idles: True if a batch may leave parameters without a gradient (the same ones on all ranks); see
            `ObjectiveConfig.idle_heads`.
    """

    idles: ClassVar[bool] = False

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.config = encoder.config
        self.model = encoder
        # an encoder from a plugin may only return the states of every token
        self._takes_positions = "positions_M" in inspect.signature(encoder.forward).parameters

    @classmethod
    def build(cls, encoder: Encoder, objective: Any, another: Callable[[ModelConfig], Encoder]) -> Self:
        """Build the model that an objective trains on an encoder; `another` creates further encoders."""
        return cls(encoder, z_loss=objective.z_loss)  # type: ignore[call-arg]

    @classmethod
    def alone(cls, encoder: Encoder) -> OnEncoder:
        """Build the part that needs one encoder only; weight formats may have names for it."""
        return cls(encoder)

    def forward(self, batch: Batch, figures: bool = False) -> Sums:
        """Return the sums of a microbatch, without a host sync.

        Args:
            batch: on the model's device.
            figures: also compute figures such as hits; takes the plain, unchunked path.
        """
        raise NotImplementedError

    @property
    def encoders(self) -> list[Encoder]:
        """All encoders of this model, the trained one first."""
        return [self.model]

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Recompute each layer in the backward pass (activation checkpointing), regardless of compute.*."""
        before = [encoder.compute for encoder in self.encoders]
        for encoder, compute in zip(self.encoders, before, strict=True):
            encoder.compute = replace(compute, activation_checkpointing=True)
        try:
            yield
        finally:
            for encoder, compute in zip(self.encoders, before, strict=True):
                encoder.compute = compute

    def set_phase(self, model: Any) -> None:
        """Switch to a phase's values of the architecture; called before every step."""
        self.config = model
        self.model.set_phase(model)

    def compile_layers(self, **options: Any) -> None:
        """torch.compile each layer and the regions around them in place; parameter names stay. Call it before sharding.

        Shapes are static within a phase for any documents. Each (kind of layer, train or eval, shape) is one
        graph: first, local and global layers make 6 for each shape, and each region 2. Beyond `MAX_GRAPHS` graphs
        torch raises FailOnRecompileLimitHit, which names what changes.

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
        """Return the final hidden states of every token (pads too), hidden_TD, or of the given positions, hidden_MD.

        Under FSDP2 call torch.distributed.fsdp.register_fsdp_forward_method(model, "encode") first.
        """
        if positions_M is None:
            hidden: Tensor = self.model(packed)
            return hidden
        if self._takes_positions:
            chosen: Tensor = self.model(packed, positions_M)
            return chosen
        return take_rows(self.model(packed), positions_M)
