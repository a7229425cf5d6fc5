"""ESM-2 on packed buffers: Llama's frame with BERT's layers, normed before their parts (10.1126/science.ade2574).

With token dropout a masked token's embedding is zero, and the others of its sequence are scaled to compensate for the
observed share of masks. Masks are counted as integers, so a sequence's states do not depend on its neighbours.

Shape legend: T packed tokens, S sequences (padded), D model width, N heads, H head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modernbert_train.batch import Packed
from modernbert_train.config.schema import ComputeConfig, EsmConfig
from modernbert_train.models import bert
from modernbert_train.models.attention import Kernel
from modernbert_train.models.compiler import region
from modernbert_train.models.heads import PredictionHead
from modernbert_train.models.layers import attend_rotary, rotary_frequencies
from modernbert_train.models.llama import Llama
from modernbert_train.models.lookup import Embedding

MASKED_IN_TRAINING = 0.15 * 0.8  # the share of masks that scales are relative to; a constant in the published code


class Embeddings(nn.Module):
    """Token embeddings with token dropout; positions enter in the attention."""

    def __init__(self, config: EsmConfig) -> None:
        super().__init__()
        self.tok_embeddings = Embedding(config.vocab_size, config.hidden_size)
        self.mask_id = config.mask_id if config.token_dropout else None

    def forward(self, packed: Packed) -> Tensor:
        hidden_TD: Tensor = self.tok_embeddings(packed.input_ids_T)
        if self.mask_id is None:
            return hidden_TD
        masked_T = packed.input_ids_T == self.mask_id
        begins_S, ends_S = packed.cu_seqlens_S[:-1].long(), packed.cu_seqlens_S[1:].long()
        before_T = F.pad(masked_T.long().cumsum(0), (1, 0))
        share_S = (before_T[ends_S] - before_T[begins_S]) / (ends_S - begins_S)  # empty sequences: NaN, never read
        sequence_T = torch.searchsorted(ends_S, torch.arange(len(masked_T), device=ends_S.device), right=True)
        scale_T = ((1 - MASKED_IN_TRAINING) / (1 - share_S[sequence_T])).masked_fill(masked_T, 0.0)
        return hidden_TD * scale_T.to(hidden_TD.dtype).unsqueeze(1)


class Attention(bert.Attention):
    """BERT's, with rotary positions."""

    def forward(self, x_TD: Tensor, rotary: tuple[Tensor, Tensor], kernel: Kernel, layout: Any) -> Tensor:  # type: ignore[override]
        qkv_T3NH = self.Wqkv(x_TD).unflatten(-1, self.split)
        return self.Wo(attend_rotary(qkv_T3NH, rotary, kernel, layout, False).flatten(1))


class Layer(bert.EncoderLayer):
    """Pre-norm: x + attn(norm(x)), then x + mlp(norm(x))."""

    def forward(self, x_TD: Tensor, *inputs: Any) -> Tensor:
        x_TD = x_TD + self.attn(self.attn_norm(x_TD), *inputs)
        return x_TD + self.mlp(self.mlp_norm(x_TD))


class Esm(Llama):
    """Embeddings, layers and the final norm."""

    config: EsmConfig

    def __init__(self, config: EsmConfig, compute: ComputeConfig) -> None:
        super().__init__(config, compute)
        self.embeddings = Embeddings(config)
        self.final_norm = bert.layer_norm(config)

    def layer(self, index: int) -> nn.Module:
        """See `Llama`."""
        return Layer(self.config, Attention(self.config), bert.FeedForward(self.config))

    def rotary(self, position_ids_T: Tensor, dtype: torch.dtype) -> dict[bool, tuple[Tensor, Tensor]]:
        """See `Encoder`."""
        config = self.config
        frequencies = rotary_frequencies(config.rope_theta, config.head_size, position_ids_T.device)
        return {True: self.rotary_of(position_ids_T, frequencies, dtype)}

    def prediction_head(self) -> nn.Module:
        """See `Encoder`."""
        return PredictionHead(self.config, self.embedding().shape[1], bias=True)

    @region
    def enter(self, packed: Packed) -> Tensor:
        """See `Llama`."""
        hidden_TD: Tensor = self.embeddings(packed)
        return hidden_TD
