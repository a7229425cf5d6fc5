"""Gemma 3's text model on packed buffers (arXiv 2503.19786): Llama with four differences.

Embeddings are multiplied by the root of the width; each part of a layer has a norm before and after it, which scales by
1 + its parameter; the gate's activation is GELU by the tanh formula; and most layers attend within a window.

Shape legend: T packed tokens, D model width.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modernbert_train.batch import Packed
from modernbert_train.config.schema import ComputeConfig, GemmaConfig
from modernbert_train.models.attention import Kernel, for_each_reach
from modernbert_train.models.layers import compute_dtype
from modernbert_train.models.llama import Attention, Embeddings, Llama, SwiGLU


class RMSNorm(nn.Module):
    """x / rms(x) * (1 + scale), in fp32.

    Args:
        width: of x.
        eps: added to the mean square.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.scale_bias = nn.Parameter(torch.zeros(width))  # named a bias: it starts at 0 and is not decayed

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (wide * (1.0 + self.scale_bias.float())).to(x.dtype)


class ScaledEmbeddings(Embeddings):
    """Token embeddings times the root of their width; the decoder is tied to the unscaled table."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__(config)
        self.scale = config.hidden_size**0.5

    def forward(self, input_ids_T: Tensor) -> Tensor:
        return super().forward(input_ids_T) * self.scale


class Layer(nn.Module):
    """x + norm(attn(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, config: GemmaConfig, window: bool) -> None:
        super().__init__()
        norm = functools.partial(RMSNorm, config.hidden_size, config.norm_eps)
        self.attn_norm, self.attn_out_norm, self.mlp_norm, self.mlp_out_norm = norm(), norm(), norm(), norm()
        self.attn = Attention(config, window=window, norm=RMSNorm)
        self.mlp = SwiGLU(config, functools.partial(F.gelu, approximate="tanh"))

    def forward(self, x_TD: Tensor, rotary: tuple[Tensor, Tensor], kernel: Kernel, layout: Any) -> Tensor:
        x_TD = x_TD + self.attn_out_norm(self.attn(self.attn_norm(x_TD), rotary, kernel, layout))
        return x_TD + self.mlp_out_norm(self.mlp(self.mlp_norm(x_TD)))


class Gemma(Llama):
    """Embeddings, layers and the final norm."""

    config: GemmaConfig

    def __init__(self, config: GemmaConfig, compute: ComputeConfig) -> None:
        super().__init__(config, compute)
        self.embeddings = ScaledEmbeddings(config)
        self.final_norm = RMSNorm(config.hidden_size, config.norm_eps)

    def layer(self, index: int) -> nn.Module:
        """See `Llama`."""
        return Layer(self.config, not self.config.is_global(index))

    def forward(self, packed: Packed, positions_M: Tensor | None = None) -> Tensor:
        """See `Encoder`."""
        config, compute = self.config, self.compute
        hidden_TD = self.enter(packed)
        device, dtype = hidden_TD.device, compute_dtype(hidden_TD)
        half_window = config.half_window(packed.order)
        attention = for_each_reach(compute, packed, device, dtype, half_window, config.local_heads)
        rotary = self.rotary(packed.position_ids_T, dtype)
        recompute = compute.activation_checkpointing and torch.is_grad_enabled()
        for index, layer in enumerate(self.layers):
            is_global = config.is_global(index)
            inputs = (hidden_TD, rotary[is_global], *attention[is_global])
            hidden_TD = checkpoint(layer, *inputs, use_reentrant=False) if recompute else layer(*inputs)
        return self.leave(hidden_TD, positions_M)
