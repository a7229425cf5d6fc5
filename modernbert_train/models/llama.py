"""Llama, Qwen2, Qwen3 and EuroBERT on packed buffers, top to bottom (arXiv 2302.13971, 2503.05500, 2505.09388).

Pre-norm layers with RMSNorm, grouped-query attention with rotary positions, and SwiGLU. The objective decides which
tokens a token sees: its whole sequence, as in EuroBERT, or itself and the tokens before it. The decoder reads the final
norm's output directly, without a head; it is tied to the embedding or separate.

Keys and values are repeated for the query heads that share them, since not every kernel supports shared heads. Names
are ours: weights/formats/llama.py translates to transformers' names and back.

Shape legend: T packed tokens, D model width, F hidden width, N heads, K heads of keys and values, H head width,
E = H / 2 rotated pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modernbert_train.batch import Packed
from modernbert_train.config.schema import ComputeConfig, LlamaConfig, ModelConfig
from modernbert_train.models.attention import Kernel, for_all_layers
from modernbert_train.models.casts import Linear
from modernbert_train.models.compiler import region
from modernbert_train.models.encoder import Encoder
from modernbert_train.models.layers import compute_dtype, rotate
from modernbert_train.models.lookup import Embedding, take_rows


class RMSNorm(nn.Module):
    """x / rms(x) * weight, with the mean square in fp32.

    Args:
        width: of x.
        eps: added to the mean square.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return self.weight * wide.to(x.dtype)


class Embeddings(nn.Module):
    """Token embeddings; positions enter in the attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tok_embeddings = Embedding(config.vocab_size, config.hidden_size)

    def forward(self, input_ids_T: Tensor) -> Tensor:
        return self.tok_embeddings(input_ids_T)


class Attention(nn.Module):
    """Self-attention in which several query heads share one head of keys and values."""

    stacked: ClassVar = {"Wkv": 2}  # number of matrices stacked along the rows of a weight; read by optim/groups.py

    def __init__(
        self, config: LlamaConfig, *, window: bool = False, norm: Callable[[int, float], nn.Module] = RMSNorm
    ) -> None:
        super().__init__()
        self.window = window
        self.heads, self.kv_heads, self.head_size = config.num_heads, config.kv_heads, config.head_size
        self.Wq = Linear(config.hidden_size, config.attention_width, bias=config.qkv_bias)
        self.Wkv = Linear(config.hidden_size, 2 * config.kv_heads * config.head_size, bias=config.qkv_bias)
        self.Wo = Linear(config.attention_width, config.hidden_size, bias=False)
        self.q_norm = norm(config.head_size, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = norm(config.head_size, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x_TD: Tensor, rotary: tuple[Tensor, Tensor], kernel: Kernel, layout: Any) -> Tensor:
        q_TNH = self.q_norm(self.Wq(x_TD).unflatten(-1, (self.heads, self.head_size)))
        k_TKH, v_TKH = self.Wkv(x_TD).unflatten(-1, (2, self.kv_heads, self.head_size)).unbind(1)
        q_TNH = rotate(q_TNH.unsqueeze(1), *rotary).squeeze(1).to(v_TKH.dtype)
        k_TKH = rotate(self.k_norm(k_TKH).unsqueeze(1), *rotary).squeeze(1).to(v_TKH.dtype)
        shared = self.heads // self.kv_heads
        k_TNH, v_TNH = (each.repeat_interleave(shared, dim=1) if shared > 1 else each for each in (k_TKH, v_TKH))
        return self.Wo(kernel.attend(q_TNH, k_TNH, v_TNH, layout, self.window).flatten(1))


class SwiGLU(nn.Module):
    """Gated feed-forward: SiLU, or another activation, on the first half of Wi's output, times the second."""

    stacked: ClassVar = {"Wi": 2}

    def __init__(self, config: ModelConfig, activation: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.activation = activation
        self.Wi = Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.Wo = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        gate_TF, value_TF = self.Wi(x_TD).chunk(2, dim=-1)
        return self.Wo(self.activation(gate_TF) * value_TF)


class Layer(nn.Module):
    """Pre-norm: x + attn(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, attn: nn.Module) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn = attn
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x_TD: Tensor, rotary: tuple[Tensor, Tensor], kernel: Kernel, layout: Any) -> Tensor:
        x_TD = x_TD + self.attn(self.attn_norm(x_TD), rotary, kernel, layout)
        return x_TD + self.mlp(self.mlp_norm(x_TD))


class Llama(Encoder):
    """Embeddings, layers and the final norm."""

    def __init__(self, config: ModelConfig, compute: ComputeConfig) -> None:
        super().__init__()
        self.config = config
        self.compute = compute
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(self.layer(index) for index in range(config.num_layers))
        self.final_norm: nn.Module = RMSNorm(config.hidden_size, config.norm_eps)

    def layer(self, index: int) -> nn.Module:
        """Build the layer with this index, from 0."""
        return Layer(self.config, Attention(self.config))

    def prediction_head(self) -> nn.Module:
        """See `Encoder`: the identity, or a projection if the decoder is tied to a wider model's embedding."""
        width = self.embedding().shape[1]
        return nn.Identity() if width == self.config.hidden_size else Linear(self.config.hidden_size, width)

    @region
    def enter(self, packed: Packed) -> Tensor:
        """Return the first hidden states, hidden_TD."""
        hidden_TD: Tensor = self.embeddings(packed.input_ids_T)
        return hidden_TD

    @region
    def leave(self, hidden_TD: Tensor, positions_M: Tensor | None) -> Tensor:
        """See `Encoder`. Rows are taken before the norm, which then computes only those."""
        if positions_M is not None:
            hidden_TD = take_rows(hidden_TD, positions_M)
        normed: Tensor = self.final_norm(hidden_TD)
        return normed

    def forward(self, packed: Packed, positions_M: Tensor | None = None) -> Tensor:
        """See `Encoder`."""
        hidden_TD = self.enter(packed)
        device, dtype = hidden_TD.device, compute_dtype(hidden_TD)
        kernel, layout = for_all_layers(self.compute, packed, device, dtype)
        rotary = self.rotary(packed.position_ids_T, dtype)[True]
        recompute = self.compute.activation_checkpointing and torch.is_grad_enabled()
        for layer in self.layers:
            inputs = (hidden_TD, rotary, kernel, layout)
            hidden_TD = checkpoint(layer, *inputs, use_reentrant=False) if recompute else layer(*inputs)
        return self.leave(hidden_TD, positions_M)
