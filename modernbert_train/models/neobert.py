"""NeoBERT on packed buffers (arXiv 2502.19587): Llama's layers, with two differences.

The rows of Wqkv are query, key and value of the first head, then of the next; and rotary positions turn neighbouring
channels of a head. Both match its files, so weights convert bit by bit in both directions. The decoder is separate and
has a bias.

Shape legend: T packed tokens, D model width, N heads, H head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from modernbert_train.config.schema import NeoBertConfig
from modernbert_train.models.attention import Kernel
from modernbert_train.models.casts import Linear
from modernbert_train.models.layers import rotary_frequencies, rotated
from modernbert_train.models.llama import Layer, Llama

THETA = 10_000.0  # base of the rotary positions; its config.json cannot set another


class Attention(nn.Module):
    """Multi-head self-attention without biases."""

    def __init__(self, config: NeoBertConfig) -> None:
        super().__init__()
        self.split = (config.num_heads, 3, config.head_size)
        self.Wqkv = Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.Wo = Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x_TD: Tensor, rotary: tuple[Tensor, Tensor], kernel: Kernel, layout: Any) -> Tensor:
        qkv_T3NH = self.Wqkv(x_TD).unflatten(-1, self.split).transpose(1, 2)
        q_TNH, k_TNH, v_TNH = rotated(qkv_T3NH, *rotary, neighbours=True)
        return self.Wo(kernel.attend(q_TNH, k_TNH, v_TNH, layout, False).flatten(1))


class NeoBert(Llama):
    """Embeddings, layers and the final norm."""

    config: NeoBertConfig

    def layer(self, index: int) -> nn.Module:
        """See `Llama`."""
        return Layer(self.config, Attention(self.config))

    def rotary(self, position_ids_T: Tensor, dtype: torch.dtype) -> dict[bool, tuple[Tensor, Tensor]]:
        """See `Encoder`."""
        frequencies = rotary_frequencies(THETA, self.config.head_size, position_ids_T.device)
        return {True: self.rotary_of(position_ids_T, frequencies, dtype)}
