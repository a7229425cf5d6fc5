"""The parts of a ModernBERT layer: rotary positions, attention around a kernel, GeGLU, and the layer itself.

Modules are named as in transformers' ModernBERT, so a state dict loads as it is. The encoder computes once,
and passes as arguments, the inputs common to all layers of a microbatch: rotary tables, the kernel and its layout.

Shape legend: T packed tokens, D model width, F hidden width, N heads, H head width, E = H / 2 rotated pairs.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modernbert_train.config.model import RotaryConfig
from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.models.attention import Kernel, RotatingKernel
from modernbert_train.models.casts import Linear


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the precision of matrix products with x: autocast's if it is on, else x's own."""
    device = x.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast else x.dtype


def rotary_tables(position_ids_T: Tensor, theta: float, head_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine of every angle position * theta^(-2e / head_size), as `rotate` expects them.

    Angles are always computed in fp32: in bf16, positions above 256 are no longer distinct.

    Returns:
        cos_TE, and sin_T2E: the negated sine, then the sine; in `dtype`.

    Source: Su et al. 2021, arXiv:2104.09864.
    """
    return rotary_of(position_ids_T, rotary_frequencies(theta, head_size, position_ids_T.device), dtype)


def rotary_frequencies(theta: float, head_size: int, device: torch.device) -> Tensor:
    """Return inverse_E, theta^(-2e / head_size), in fp32."""
    exponent_E = torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size
    return 1.0 / theta**exponent_E


def scaled_frequencies(config: RotaryConfig, is_global: bool, device: torch.device) -> tuple[Tensor, float]:
    """Return inverse_E of global or local layers, in fp32, and the factor of the rotary tables.

    Source of llama3: arXiv 2407.21783 and meta-llama/llama-models, models/llama3/model.py; of yarn: arXiv 2309.00071,
    whose factor scales queries and keys, so scores by its square.
    """
    theta, size = config.thetas[is_global], config.head_size
    inverse_E = rotary_frequencies(theta, size, device)
    if not config.is_scaled(is_global):
        return inverse_E, 1.0
    if config.rope_scaling == "linear":
        return inverse_E / config.rope_factor, 1.0
    if config.rope_scaling == "llama3":
        table_factor, low, high = 1.0, config.rope_low_freq, config.rope_high_freq
        turns_E = config.rope_original_tokens * inverse_E / (2 * math.pi)
        fast_E = ((turns_E - low) / (high - low)).clamp(0, 1)
    else:  # yarn is linear in the index of a pair, between the pairs with these turns
        factor = config.rope_attention_factor
        table_factor = 0.1 * math.log(config.rope_factor) + 1 if factor is None else factor
        first, last = (
            size * math.log(config.rope_original_tokens / (2 * math.pi * turns)) / (2 * math.log(theta))
            for turns in (config.rope_beta_fast, config.rope_beta_slow)
        )
        first, last = max(math.floor(first), 0), min(math.ceil(last), size - 1)
        pair_E = torch.arange(size // 2, device=device, dtype=torch.float32)
        fast_E = 1 - ((pair_E - first) / (last - first or 0.001)).clamp(0, 1)
    return (1 - fast_E) * inverse_E / config.rope_factor + fast_E * inverse_E, table_factor


def rotary_of(
    position_ids_T: Tensor, inverse_E: Tensor, dtype: torch.dtype, table_factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return `rotary_tables` for given frequencies: angles are position * inverse_E; tables are times a factor."""
    angle_TE = position_ids_T.float().unsqueeze(1) * inverse_E
    cos_TE, sin_TE = angle_TE.cos(), angle_TE.sin()
    if table_factor != 1:  # of yarn alone: other steps launch no kernel for it
        cos_TE, sin_TE = cos_TE * table_factor, sin_TE * table_factor
    sin_TE = sin_TE.to(dtype)
    return cos_TE.to(dtype), torch.stack((-sin_TE, sin_TE), dim=1)


def rotate(x_TANH: Tensor, cos_TE: Tensor, sin_T2E: Tensor) -> Tensor:
    """Rotate each pair (e, e + H/2) of every head by its position's angle; A is the number of tensors (q and k: 2).

    `flip` exchanges the halves, and Inductor turns it into an index. With slices and `cat` it would materialise an fp32
    tensor, and the backward pass would need one more kernel.
    """
    pairs_TAN2E = x_TANH.float().unflatten(-1, (2, -1))
    cos, sin = cos_TE[:, None, None, None].float(), sin_T2E[:, None, None].float()
    turned_TAN2E = pairs_TAN2E * cos + pairs_TAN2E.flip(-2) * sin
    return turned_TAN2E.flatten(-2).to(x_TANH.dtype)


def rotated(
    qkv_T3NH: Tensor, cos_TE: Tensor, sin_T2E: Tensor, *, neighbours: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q and k turned by `rotate`, and v unchanged.

    Compiled, q and k are rotated separately: it is still one kernel, and each gradient is written directly into its
    third of qkv, where a joint rotation would first concatenate the gradients. In eager mode one joint call launches
    fewer kernels.

    Args:
        qkv_T3NH: output of one projection.
        cos_TE, sin_T2E: see `rotary_tables`.
        neighbours: the pairs of a head are (2e, 2e + 1); reorder them to (e, e + H/2) for `rotate`. Attention scores do
            not depend on the order of a head's channels.
    """
    if torch.compiler.is_compiling():
        *singles, v_TNH = qkv_T3NH.unbind(1)
        unsqueezed = [x_TNH.unsqueeze(1) for x_TNH in singles]
    else:
        qk_T2NH, v_T1NH = qkv_T3NH.split((2, 1), dim=1)
        unsqueezed, v_TNH = [qk_T2NH], v_T1NH.squeeze(1)
    if neighbours:
        unsqueezed = [part.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for part in unsqueezed]
    q_TNH, k_TNH = (x_TNH for part in unsqueezed for x_TNH in rotate(part, cos_TE, sin_T2E).unbind(1))
    return q_TNH, k_TNH, v_TNH


def attend_rotary(qkv_T3NH: Tensor, rotary: tuple[Tensor, Tensor], kernel: Kernel, layout: Any, window: bool) -> Tensor:
    """Compute attention with rotary positions; in local layers a `RotatingKernel` rotates q and k itself.

    Args:
        qkv_T3NH: output of one projection.
        rotary: see `rotary_tables`.
        kernel, layout, window: see `Kernel.attend`.
    """
    if window and hasattr(kernel, "attend_rotary"):  # torch.compile evaluates isinstance with a protocol to False
        return cast(RotatingKernel, kernel).attend_rotary(qkv_T3NH, *rotary, layout)
    return kernel.attend(*rotated(qkv_T3NH, *rotary), layout, window)


def layer_norm(config: ModernBertConfig) -> nn.LayerNorm:
    """Return ModernBERT's norm: LayerNorm without a bias."""
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=False)


class Attention(nn.Module):
    """Multi-head self-attention without biases; dropout only after the output projection."""

    stacked: ClassVar = {"Wqkv": 3}  # number of matrices stacked along the rows of a weight; read by optim/groups.py

    def __init__(self, config: ModernBertConfig, window: bool) -> None:
        super().__init__()
        self.window = window
        self.split = (3, config.num_heads, config.head_size)
        self.Wqkv = Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.Wo = Linear(config.hidden_size, config.hidden_size, bias=False)
        self.out_drop = nn.Dropout(config.attention_out_dropout)

    def forward(self, x_TD: Tensor, rotary: tuple[Tensor, Tensor], kernel: Kernel, layout: Any) -> Tensor:
        qkv_T3NH = self.Wqkv(x_TD).unflatten(-1, self.split)
        out_TNH = attend_rotary(qkv_T3NH, rotary, kernel, layout, self.window)
        return self.out_drop(self.Wo(out_TNH.flatten(1)))


class GeGLU(nn.Module):
    """Gated feed-forward: exact GELU (erf) on the first half of Wi's output, gated by the second half."""

    stacked: ClassVar = {"Wi": 2}

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.Wi = Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.Wo = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        value_TF, gate_TF = self.Wi(x_TD).chunk(2, dim=-1)
        return self.Wo(F.gelu(value_TF) * gate_TF)


class EncoderLayer(nn.Module):
    """Pre-norm layer: x + attn(norm(x)), then x + mlp(norm(x)). Layer 0 skips attn_norm: embeddings end in one.

    The last sum is left to the next layer, whose norm reads it anyway. Compiled, both are one kernel, which saves a
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
        """Return the residual and the term the next layer adds to it; `added_TD` is that term of the previous layer."""
        if added_TD is not None:
            x_TD = x_TD + added_TD
        x_TD = x_TD + self.attn(self.attn_norm(x_TD), rotary, kernel, layout)
        return x_TD, self.mlp(self.mlp_norm(x_TD))
