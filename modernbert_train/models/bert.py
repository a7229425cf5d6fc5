"""BERT, RoBERTa and DistilBERT on packed buffers, top to bottom, with their masked-LM head (arXiv 1810.04805).

Learned positions that restart in each sequence, token types, post-norm layers with biases everywhere, full attention
through the same kernels as ModernBERT's global layers. As there, nothing is padded inside the model.

Query, key and value are one matrix, Wqkv; weights/formats/bert.py translates to transformers' names and back. One
difference from training transformers' model: there the embedding row of [PAD] gets no gradient as an input. In a packed
buffer pads are separate sequences without predictions, so it gets none here either, unless the objective replaces a
token by [PAD].

Shape legend: T packed tokens, M predicted positions (padded), P pairs, D model width, F hidden width, N heads,
H head width, V vocabulary.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modernbert_train.batch import Packed
from modernbert_train.config.schema import BertShape, ComputeConfig, DebertaConfig, EsmConfig, ModelConfig
from modernbert_train.models.attention import Kernel, for_all_layers
from modernbert_train.models.casts import Linear
from modernbert_train.models.compiler import region
from modernbert_train.models.encoder import GELU, Encoder, TokenHead
from modernbert_train.models.heads import PredictionHead
from modernbert_train.models.layers import compute_dtype
from modernbert_train.models.lookup import Embedding
from modernbert_train.models.masked_lm import ForMaskedLM

_PLAIN = ComputeConfig()


def layer_norm(config: Any) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps)


class Embeddings(nn.Module):
    """Sum of token, segment and position embeddings, then norm and dropout; DistilBERT lacks segments."""

    def __init__(self, config: BertShape) -> None:
        super().__init__()
        self.position_offset = config.position_offset
        self.tok_embeddings = Embedding(config.vocab_size, config.hidden_size)
        self.segment_embeddings = Embedding(config.segments, config.hidden_size) if config.segments else None
        self.position_embeddings = Embedding(config.max_positions + config.position_offset, config.hidden_size)
        self.norm = layer_norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, packed: Packed) -> Tensor:
        sum_TD = self.tok_embeddings(packed.input_ids_T)
        if self.segment_embeddings is not None:
            segments = packed.segment_ids_T
            # without segment ids: still add segment 0's vector, as in models that were trained with two segments
            sum_TD = sum_TD + (
                self.segment_embeddings.weight[0] if segments is None else self.segment_embeddings(segments)
            )
        sum_TD = sum_TD + self.position_embeddings(packed.position_ids_T + self.position_offset)
        return self.dropout(self.norm(sum_TD))


class Attention(nn.Module):
    """Multi-head self-attention with biases; dropout only after the output projection."""

    stacked: ClassVar = {"Wqkv": 3}  # number of matrices stacked along the rows of a weight; read by optim/groups.py

    def __init__(self, config: BertShape | EsmConfig) -> None:
        super().__init__()
        self.split = (3, config.num_heads, config.head_size)
        self.Wqkv = Linear(config.hidden_size, 3 * config.hidden_size)
        self.Wo = Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout) if config.projection_dropout else nn.Identity()

    def forward(self, x_TD: Tensor, kernel: Kernel, layout: Any) -> Tensor:
        q_TNH, k_TNH, v_TNH = self.Wqkv(x_TD).unflatten(-1, self.split).unbind(1)
        out_TNH = kernel.attend(q_TNH, k_TNH, v_TNH, layout, False)
        return self.dropout(self.Wo(out_TNH.flatten(1)))


class FeedForward(nn.Module):
    """Two matrices with biases, GELU between them, dropout after them."""

    def __init__(self, config: BertShape | DebertaConfig | EsmConfig) -> None:
        super().__init__()
        self.approximate = GELU[config.activation]
        self.Wi = Linear(config.hidden_size, config.intermediate_size)
        self.Wo = Linear(config.intermediate_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.dropout(self.Wo(F.gelu(self.Wi(x_TD), approximate=self.approximate)))


class EncoderLayer(nn.Module):
    """Post-norm layer: norm(x + attn(x)), then norm(x + mlp(x)). `forward` passes its further inputs to `attn`."""

    def __init__(self, config: ModelConfig, attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attn = attn
        self.attn_norm = layer_norm(config)
        self.mlp = mlp
        self.mlp_norm = layer_norm(config)

    def forward(self, x_TD: Tensor, *inputs: Any) -> Tensor:
        x_TD = self.attn_norm(x_TD + self.attn(x_TD, *inputs))
        return self.mlp_norm(x_TD + self.mlp(x_TD))


class Bert(Encoder):
    """Embeddings and layers; the output is the last layer's norm."""

    tables: ClassVar = ("tok_embeddings", "position_embeddings")

    def __init__(self, config: BertShape, compute: ComputeConfig) -> None:
        super().__init__()
        self.config = config
        self.compute = compute
        self.embeddings = Embeddings(config)
        layers = ((Attention(config), FeedForward(config)) for _ in range(config.num_layers))
        self.layers = nn.ModuleList(EncoderLayer(config, *each) for each in layers)

    def prediction_head(self) -> nn.Module:
        """See `Encoder`."""
        approximate = GELU[self.config.activation]
        return PredictionHead(self.config, self.embedding().shape[1], bias=True, approximate=approximate)

    def token_head(self) -> nn.Module:
        """See `Encoder`; the same as in ELECTRA."""
        return TokenHead(self.config.hidden_size, GELU[self.config.activation])

    @region
    def enter(self, packed: Packed) -> Tensor:
        """Return the first hidden states, hidden_TD."""
        hidden_TD: Tensor = self.embeddings(packed)
        return hidden_TD

    def forward(self, packed: Packed, positions_M: Tensor | None = None) -> Tensor:
        """See `Encoder`.

        Raises:
            ValueError: sequences may exceed max_positions, or have segments that this encoder lacks.
        """
        self._check(packed)
        hidden_TD = self.enter(packed)
        kernel, layout = for_all_layers(self.compute, packed, hidden_TD.device, compute_dtype(hidden_TD))
        recompute = self.compute.activation_checkpointing and torch.is_grad_enabled()
        for layer in self.layers:
            inputs = (hidden_TD, kernel, layout)
            hidden_TD = checkpoint(layer, *inputs, use_reentrant=False) if recompute else layer(*inputs)
        return self.leave(hidden_TD, positions_M)

    def _check(self, packed: Packed) -> None:
        if packed.max_seqlen > self.config.max_positions:
            raise ValueError(
                f"sequences of up to {packed.max_seqlen} tokens, but model.max_positions={self.config.max_positions}. "
                "Shorten the phase's row_tokens, or train a model with more positions."
            )
        if packed.segment_ids_T is not None and self.config.segments == 1:
            raise ValueError("the objective makes pairs, but model.segments=1. Set model.segments=2.")


class BertForMaskedLM(ForMaskedLM):
    """The encoder with its masked-LM head.

    Args:
        config: the architecture.
        compute: kernels and recomputation.
        z_loss: see `masked_lm_loss_sum`.
    """

    def __init__(self, config: BertShape, compute: ComputeConfig = _PLAIN, *, z_loss: float = 0.0) -> None:
        super().__init__(Bert(config, compute), z_loss=z_loss)
