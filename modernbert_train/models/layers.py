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
from modernbert_train.models.casts import Linear


def compute_dtype(x: Tensor) -> torch.dtype:
    """The precision of matrix products with x: autocast's, where it is on."""
    device = x.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast else x.dtype


def rotary_tables(position_ids_T: Tensor, theta: float, head_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every angle position * theta^(-2e / head_size), as `rotate` takes them.

    The angles are computed in fp32 whatever `dtype` is: in bf16 positions above 256 are no longer distinct.

    Returns:
        cos_TE, and in sin_T2E the sine negated, then as it is; in `dtype`.

    Source: Su et al. 2021, arXiv:2104.09864.
    """
    return rotary_of(position_ids_T, rotary_frequencies(theta, head_size, position_ids_T.device), dtype)


def rotary_frequencies(theta: float, head_size: int, device: torch.device) -> Tensor:
    """Return inverse_E, theta^(-2e / head_size), in fp32."""
    exponent_E = torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size
    return 1.0 / theta**exponent_E


def rotary_of(position_ids_T: Tensor, inverse_E: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same of any frequencies: angles are position * inverse_E."""
    angle_TE = position_ids_T.float().unsqueeze(1) * inverse_E
    sin_TE = angle_TE.sin().to(dtype)
    return angle_TE.cos().to(dtype), torch.stack((-sin_TE, sin_TE), dim=1)


def rotate(x_TANH: Tensor, cos_TE: Tensor, sin_T2E: Tensor) -> Tensor:
    """Turn each pair (e, e + H/2) of every head by its position's angle; A is any number of tensors (q and k: 2).

    The halves are exchanged by `flip`, which Inductor computes as an index. Of slices and a `cat` it makes a tensor, in
    fp32, and the backward pass one more kernel.
    """
    pairs_TAN2E = x_TANH.float().unflatten(-1, (2, -1))
    cos, sin = cos_TE[:, None, None, None].float(), sin_T2E[:, None, None].float()
    turned_TAN2E = pairs_TAN2E * cos + pairs_TAN2E.flip(-2) * sin
    return turned_TAN2E.flatten(-2).to(x_TANH.dtype)


def rotated(
    qkv_T3NH: Tensor, cos_TE: Tensor, sin_T2E: Tensor, *, neighbours: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k turned by `rotate`, and v as it is.

    Compiled, q and k are turned apart, which is one kernel all the same, and each gradient is written into its third;
    of both together the gradients would be joined in a copy first. Eager, one call for both launches less.

    Args:
        qkv_T3NH: of one projection.
        cos_TE, sin_T2E: see `rotary_tables`.
        neighbours: the pairs of a head are (2e, 2e + 1); they are brought apart, as `rotate` has them. A score is the
            same in any order of a head's numbers.
    """
    if torch.compiler.is_compiling():
        *singles, v_TNH = qkv_T3NH.unbind(1)
        parts = [x_TNH.unsqueeze(1) for x_TNH in singles]
    else:
        qk_T2NH, v_T1NH = qkv_T3NH.split((2, 1), dim=1)
        parts, v_TNH = [qk_T2NH], v_T1NH.squeeze(1)
    if neighbours:
        parts = [part.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for part in parts]
    q_TNH, k_TNH = (x_TNH for part in parts for x_TNH in rotate(part, cos_TE, sin_T2E).unbind(1))
    return q_TNH, k_TNH, v_TNH


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
        self.Wqkv = Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.Wo = Linear(config.hidden_size, config.hidden_size, bias=False)
        self.out_drop = nn.Dropout(config.attention_out_dropout)

    def forward(self, x_TD: Tensor, rotary: tuple[Tensor, Tensor], kernel: Kernel, layout: Any) -> Tensor:
        q_TNH, k_TNH, v_TNH = rotated(self.Wqkv(x_TD).unflatten(-1, self.split), *rotary)
        out_TNH = kernel.attend(q_TNH, k_TNH, v_TNH, layout, self.window)
        return self.out_drop(self.Wo(out_TNH.flatten(1)))


class GeGLU(nn.Module):
    """Gated feed-forward: exact GELU (erf) on the first half of Wi's output, the second half is the gate."""

    stacked: ClassVar = {"Wi": 2}

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.Wi = Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.Wo = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        value_TF, gate_TF = self.Wi(x_TD).chunk(2, dim=-1)
        return self.Wo(F.gelu(value_TF) * gate_TF)


class EncoderLayer(nn.Module):
    """Pre-norm: x + attn(norm(x)), then x + mlp(norm(x)). Layer 0 reads the embedding's norm, so it has none itself.

    The last sum is left to the next layer, whose norm reads it anyway: compiled, both are one kernel, which saves a
    pass over the fp32 residual in each direction.
    """

    def __init__(self, config: ModernBertConfig, index: int) -> None:
        super().__init__()
        self.attn_norm = nn.Identity() if index == 0 else layer_norm(config)
        self.attn = Attention(config, window=not config.is_global(index))
        self.mlp_norm = layer_norm(config)
        self.mlp = GeGLU(config)

    def forward(
        self, x_TD: Tensor, added_TD: Tensor | None, rotary: tuple[Tensor, Tensor], kernel: Kernel, layout: Any
    ) -> tuple[Tensor, Tensor]:
        """Residual and what is yet to be added to it, of the layer before and then of this one."""
        if added_TD is not None:
            x_TD = x_TD + added_TD
        x_TD = x_TD + self.attn(self.attn_norm(x_TD), rotary, kernel, layout)
        return x_TD, self.mlp(self.mlp_norm(x_TD))
