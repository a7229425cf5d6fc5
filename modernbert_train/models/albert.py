"""ALBERT on packed buffers, top to bottom, with the heads it is pre-trained with (arXiv 1909.11942).

Like BERT (bert.py), with two differences: the embedding tables are narrow and projected to the model's width, and
layers share weights. A layer is therefore two units, attention and feed-forward, each with its residual and norm, and
`AlbertConfig.path` lists the units of each layer; several layers may use the same unit. Its gradient is summed over
them; each use draws fresh dropout.

Dropout follows transformers' ALBERT: after the embeddings and after the attention's projection, and none after the
feed-forward, where Google's code has one.

Query, key and value are one matrix, Wqkv; weights/formats/albert.py translates to transformers' names and back.

Shape legend: T packed tokens, M predicted positions (padded), D model width, E width of the embedding, F hidden width,
N heads, H head width, V vocabulary.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modernbert_train.batch import Packed
from modernbert_train.config.schema import AlbertConfig, ComputeConfig
from modernbert_train.models.attention import Kernel, for_all_layers
from modernbert_train.models.casts import Linear
from modernbert_train.models.compiler import region
from modernbert_train.models.encoder import GELU, Encoder
from modernbert_train.models.heads import PredictionHead
from modernbert_train.models.layers import compute_dtype
from modernbert_train.models.lookup import Embedding
from modernbert_train.models.masked_lm import ForMaskedLM

_PLAIN = ComputeConfig()


class Embeddings(nn.Module):
    """Sum of token, segment and position embeddings, then norm and dropout; all of width E."""

    def __init__(self, config: AlbertConfig) -> None:
        super().__init__()
        self.tok_embeddings = Embedding(config.vocab_size, config.embedding_size)
        self.segment_embeddings = Embedding(config.segments, config.embedding_size)
        self.position_embeddings = Embedding(config.max_positions, config.embedding_size)
        self.norm = nn.LayerNorm(config.embedding_size, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, packed: Packed) -> Tensor:
        segments = packed.segment_ids_T
        # without segment ids: still add segment 0's vector, as in models that were trained with two segments
        segment_E = self.segment_embeddings.weight[0] if segments is None else self.segment_embeddings(segments)
        sum_TE = self.tok_embeddings(packed.input_ids_T) + segment_E
        sum_TE = sum_TE + self.position_embeddings(packed.position_ids_T)
        return self.dropout(self.norm(sum_TE))


class Attention(nn.Module):
    """norm(x + attn(x)): multi-head self-attention with biases; dropout only after the output projection."""

    stacked: ClassVar = {"Wqkv": 3}  # number of matrices stacked along the rows of a weight; read by optim/groups.py

    def __init__(self, config: AlbertConfig) -> None:
        super().__init__()
        self.split = (3, config.num_heads, config.head_size)
        self.Wqkv = Linear(config.hidden_size, 3 * config.hidden_size)
        self.Wo = Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)

    def forward(self, x_TD: Tensor, kernel: Kernel, layout: Any) -> Tensor:
        q_TNH, k_TNH, v_TNH = self.Wqkv(x_TD).unflatten(-1, self.split).unbind(1)
        out_TNH = kernel.attend(q_TNH, k_TNH, v_TNH, layout, False)
        return self.norm(x_TD + self.dropout(self.Wo(out_TNH.flatten(1))))


class FeedForward(nn.Module):
    """norm(x + mlp(x)): two matrices with biases, GELU between them, no dropout."""

    def __init__(self, config: AlbertConfig) -> None:
        super().__init__()
        self.approximate = GELU[config.activation]
        self.Wi = Linear(config.hidden_size, config.intermediate_size)
        self.Wo = Linear(config.intermediate_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.norm(x_TD + self.Wo(F.gelu(self.Wi(x_TD), approximate=self.approximate)))


class Albert(Encoder):
    """Embeddings, projection and layers; the output is the last layer's norm.

    `layers` holds each unit once: the attentions, then the feed-forwards.
    """

    tables: ClassVar = ("tok_embeddings", "position_embeddings")

    def __init__(self, config: AlbertConfig, compute: ComputeConfig) -> None:
        super().__init__()
        self.config = config
        self.compute = compute
        self.embeddings = Embeddings(config)
        self.projection = Linear(config.embedding_size, config.hidden_size)
        attentions = (Attention(config) for _ in config.passes("attention"))
        self.layers = nn.ModuleList([*attentions, *(FeedForward(config) for _ in config.passes("ffn"))])

    def prediction_head(self) -> nn.Module:
        """See `Encoder`."""
        approximate = GELU[self.config.activation]
        return PredictionHead(self.config, self.config.embedding_size, bias=True, approximate=approximate)

    @region
    def enter(self, packed: Packed) -> Tensor:
        """Return the first hidden states, hidden_TD."""
        hidden_TD: Tensor = self.projection(self.embeddings(packed))
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
        for attention, ffn in self.config.path:
            for unit, inputs in ((attention, (kernel, layout)), (ffn, ())):
                layer = self.layers[unit]
                hidden_TD = (
                    checkpoint(layer, hidden_TD, *inputs, use_reentrant=False)
                    if recompute
                    else layer(hidden_TD, *inputs)
                )
        return self.leave(hidden_TD, positions_M)

    def _check(self, packed: Packed) -> None:
        if packed.max_seqlen > self.config.max_positions:
            raise ValueError(
                f"sequences of up to {packed.max_seqlen} tokens, but model.max_positions={self.config.max_positions}. "
                "Shorten the phase's row_tokens, or train a model with more positions."
            )
        if packed.segment_ids_T is not None and self.config.segments < 2:
            raise ValueError(
                f"the objective makes pairs, but model.segments={self.config.segments}. Set model.segments=2."
            )


class AlbertForMaskedLM(ForMaskedLM):
    """The encoder with its masked-LM head.

    Args:
        config: the architecture.
        compute: kernels and recomputation.
        z_loss: see `masked_lm_loss_sum`.
    """

    def __init__(self, config: AlbertConfig, compute: ComputeConfig = _PLAIN, *, z_loss: float = 0.0) -> None:
        super().__init__(Albert(config, compute), z_loss=z_loss)
