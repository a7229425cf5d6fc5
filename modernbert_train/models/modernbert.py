"""The ModernBERT encoder on packed buffers, with its masked-LM head (arXiv 2412.13663).

All kernels share one model: rows are concatenated to a buffer of T tokens and `cu_seqlens` marks where sequences end,
so nothing is padded inside the model. Hidden states are gathered at the predicted positions before the head. That keeps
logits, the largest tensor by far, to the masked share of the tokens, and in training to one chunk of them at a time.

Modules and parameters are named as in transformers' ModernBertForMaskedLM, so state dicts load both ways unchanged.
There are no buffers: RoPE bases are plain numbers of the configuration, so a cache or a checkpoint cannot miss a change
of phase.

Shape legend: T packed tokens, M predicted positions (padded), D model width, V vocabulary, E rotated pairs of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modernbert_train.batch import Packed
from modernbert_train.config.schema import ComputeConfig, ModernBertConfig
from modernbert_train.models.attention import for_each_reach
from modernbert_train.models.compiler import region
from modernbert_train.models.encoder import Encoder
from modernbert_train.models.heads import PredictionHead
from modernbert_train.models.layers import EncoderLayer, compute_dtype, layer_norm
from modernbert_train.models.lookup import Embedding, take_rows
from modernbert_train.models.masked_lm import ForMaskedLM

_PLAIN = ComputeConfig()


class Embeddings(nn.Module):
    """Token embedding and its norm; positions enter in the attention."""

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.tok_embeddings = Embedding(config.vocab_size, config.hidden_size)
        self.norm = layer_norm(config)

    def forward(self, input_ids_T: Tensor) -> Tensor:
        return self.norm(self.tok_embeddings(input_ids_T))


class ModernBert(Encoder):
    """Embeddings, layers and the final norm."""

    def __init__(self, config: ModernBertConfig, compute: ComputeConfig) -> None:
        super().__init__()
        self.config = config
        self.compute = compute
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(EncoderLayer(config, index) for index in range(config.num_layers))
        self.final_norm = layer_norm(config)

    def prediction_head(self) -> nn.Module:
        """See `Encoder`."""
        return PredictionHead(self.config, self.embedding().shape[1])

    def token_head(self) -> nn.Module:
        """See `Encoder`; the same as in transformers' ModernBertForTokenClassification."""
        return PredictionHead(self.config)

    def set_phase(self, model: ModernBertConfig) -> None:
        """See `Encoder`: a phase may set other RoPE bases."""
        self.config = model

    @region
    def enter(self, packed: Packed) -> Tensor:
        """Return the first hidden states, hidden_TD."""
        hidden_TD: Tensor = self.embeddings(packed.input_ids_T)
        if self.compute.residual_precision == "bf16":  # then all residual sums are in bf16
            hidden_TD = hidden_TD.to(compute_dtype(hidden_TD))
        return hidden_TD

    @region
    def leave(self, hidden_TD: Tensor, positions_M: Tensor | None, added_TD: Tensor | None = None) -> Tensor:
        """See `Encoder`; adds `added_TD` first. Rows are taken before the norm, which then computes only those."""
        if positions_M is not None:
            hidden_TD = take_rows(hidden_TD, positions_M)
            added_TD = None if added_TD is None else take_rows(added_TD, positions_M)
        if added_TD is not None:
            hidden_TD = hidden_TD + added_TD
        return self.final_norm(hidden_TD.to(self.final_norm.weight.dtype))

    def forward(self, packed: Packed, positions_M: Tensor | None = None) -> Tensor:
        """See `Encoder`."""
        config, compute = self.config, self.compute
        hidden_TD, added_TD = self.enter(packed), None
        device, dtype = hidden_TD.device, compute_dtype(hidden_TD)
        attention = for_each_reach(compute, packed, device, dtype, config.half_window, config.local_heads)
        rotary = self.rotary(packed.position_ids_T, dtype)
        recompute = compute.activation_checkpointing and torch.is_grad_enabled()
        for index, layer in enumerate(self.layers):
            is_global = config.is_global(index)
            if recompute and added_TD is not None:  # checkpointing keeps a layer's inputs: keep one tensor, not two
                hidden_TD, added_TD = hidden_TD + added_TD, None
            inputs = (hidden_TD, added_TD, rotary[is_global], *attention[is_global])
            hidden_TD, added_TD = checkpoint(layer, *inputs, use_reentrant=False) if recompute else layer(*inputs)
        return self.leave(hidden_TD, positions_M, added_TD)


class ModernBertForMaskedLM(ForMaskedLM):
    """The encoder with its masked-LM head, under the names of transformers.

    Args:
        config: the architecture.
        compute: kernels and recomputation.
        z_loss: see `masked_lm_loss_sum`.
    """

    model: ModernBert

    def __init__(self, config: ModernBertConfig, compute: ComputeConfig = _PLAIN, *, z_loss: float = 0.0) -> None:
        super().__init__(ModernBert(config, compute), z_loss=z_loss)
