"""What every architecture offers: packed sequences in, hidden states out, and what an objective builds on.

Shape legend: T packed tokens, D model width, V vocabulary, E width of the embedding.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor, nn

from modernbert_train.batch import Packed


class Encoder(nn.Module):
    """An encoder on packed buffers. One file an architecture, the whole of it, top to bottom.

    Attributes:
        config: the architecture.
        layers: the units that are compiled and recomputed, each once, however many layers share it; those that a token
            passes through once (`ModelConfig.unit_passes`) are sharded each on its own.
    """

    config: Any
    layers: nn.ModuleList

    @abstractmethod
    def forward(self, packed: Packed) -> Tensor:
        """Final hidden states, hidden_TD, of every token (pads too). Nothing is read back from the device.

        Raises:
            ConfigError: compute.attention names a kernel that cannot serve this device, precision or order.
        """

    @abstractmethod
    def embedding(self) -> nn.Parameter:
        """[V, E], what a decoder is tied to; its name is embeddings.tok_embeddings.weight, as weights/ knows it."""

    @abstractmethod
    def prediction_head(self) -> nn.Module:
        """What stands between a hidden state and the decoder, new: [M, D] -> [M, E]."""

    @abstractmethod
    def set_phase(self, model: Any) -> None:
        """Go on with the architecture as it is in a phase: other values of its `phased` fields; before every step."""
