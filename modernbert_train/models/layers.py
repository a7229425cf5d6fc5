"""The parts of a ModernBERT layer: rotary positions, attention around a kernel, GeGLU, and the layer itself.

Module names are those of transformers' ModernBERT, so that a state dict needs no translation. What is the same for all
layers of a microbatch (rotary tables, the kernel and its layout) is an argument, made once by the encoder.

Shape legend: T packed tokens, D model width, F hidden width, N heads, H head width, E = H / 2 rotated pairs.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.models.attention import Kernel


def compute_dtype(x: Tensor) -> torch.dtype:
    """The precision of matrix products with x: autocast's, where it is on."""
    device = x.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast else x.dtype


def rotary_tables(position_ids_T: Tensor, theta: float, head_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every angle position * theta^(-2e / head_size).

    The angles are computed in fp32 whatever `dtype` is: in bf16 positions above 256 are no longer distinct.

    Returns:
        cos_TE and sin_TE in `dtype`.

    Source: Su et al. 2021, arXiv:2104.09864.
    """
    exponent_E = torch.arange(0, head_size, 2, device=position_ids_T.device, dtype=torch.float32) / head_size
    angle_TE = position_ids_T.float().unsqueeze(1) * (1.0 / theta**exponent_E)
    return angle_TE.cos().to(dtype), angle_TE.sin().to(dtype)


def rotate(x_TANH: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Turn each pair (e, e + H/2) of every head by its position's angle; A is any number of tensors (q and k: 2)."""
    cos, sin = cos_TE[:, None, None].float(), sin_TE[:, None, None].float()
    first, second = x_TANH.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x_TANH.dtype)


def layer_norm(config: ModernBertConfig) -> nn.LayerNorm:
    """ModernBERT's norm: LayerNorm without a bias."""
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=False)


class Attention(nn.Module):
    """Multi-head self-attention without biases; dropout only after the output projection."""

    stacked: ClassVar = {"Wqkv": 3}  # matrices that lie one below another in a weight; optim/groups.py reads it

    def __init__(self, config: ModernBertConfig, window: bool) -> None:
        super().__init__()
        self.window = window
        self.split = (3, config.num_heads, config.head_size)
        self.Wqkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.Wo = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.out_drop = nn.Dropout(config.attention_out_dropout)

    def forward(self, x_TD: Tensor, rotary: tuple[Tensor, Tensor], kernel: Kernel, layout: Any) -> Tensor:
        qkv_T3NH = self.Wqkv(x_TD).unflatten(-1, self.split)
        q_TNH, k_TNH = rotate(qkv_T3NH[:, :2], *rotary).unbind(1)
        out_TNH = kernel.attend(q_TNH, k_TNH, qkv_T3NH[:, 2], layout, self.window)
        return self.out_drop(self.Wo(out_TNH.flatten(1)))


class GeGLU(nn.Module):
    """Gated feed-forward: exact GELU (erf) on the first half of Wi's output, the second half is the gate."""

    stacked: ClassVar = {"Wi": 2}

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.Wi = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.Wo = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        value_TF, gate_TF = self.Wi(x_TD).chunk(2, dim=-1)
        return self.Wo(F.gelu(value_TF) * gate_TF)


class EncoderLayer(nn.Module):
    """Pre-norm: x + attn(norm(x)), then x + mlp(norm(x)). Layer 0 reads the embedding's norm, so it has none itself."""

    def __init__(self, config: ModernBertConfig, index: int) -> None:
        super().__init__()
        self.attn_norm = nn.Identity() if index == 0 else layer_norm(config)
        self.attn = Attention(config, window=not config.is_global(index))
        self.mlp_norm = layer_norm(config)
        self.mlp = GeGLU(config)

    def forward(self, x_TD: Tensor, rotary: tuple[Tensor, Tensor], kernel: Kernel, layout: Any) -> Tensor:
        x_TD = x_TD + self.attn(self.attn_norm(x_TD), rotary, kernel, layout)
        return x_TD + self.mlp(self.mlp_norm(x_TD))
