"""Weights from scratch: "full_megatron", the released models' initialisation (facts: arXiv 2412.13663, appendix A).

Every parameter is drawn by its own generator, seeded by the run's seed and the parameter's name. So a value does not
depend on the order of drawing, on the number of ranks, or on which other parameters a model has.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import nn

from modernbert_train.config.schema import ModelConfig
from modernbert_train.models.sharding import like


def initialize(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Fill a ModernBERT: see `draw`; the output projections (attn.Wo, mlp.Wo) are divided by sqrt(2 num_layers).

    Truncation at 2 leaves 0.88 of the deviation, as in the release.
    """
    out_std = config.init_std / math.sqrt(2 * config.num_layers)
    draw(model, lambda name: out_std if name.endswith("Wo.weight") else config.init_std, config.init_cutoff, seed)


@torch.no_grad()
def draw(model: nn.Module, init_std: Callable[[str], float], cutoff: float, seed: int) -> None:
    """Fill every parameter in place: matrices truncated normal, norms one, biases zero.

    A tied parameter is drawn once, under its first name. The parameters may be whole, on any device, or shards of
    FSDP2: a rank draws every tensor whole, one at a time, and keeps its share. So a model that is built on the meta
    device, sharded and only then given memory (`to_empty`) starts with the same weights as any other, and no rank ever
    holds all of it.

    Args:
        model: filled in place.
        init_std: a matrix's name -> its standard deviation before truncation; the mean is 0.
        cutoff: truncation, in standard deviations.
        seed: of the run.

    Raises:
        ValueError: a parameter is still on the meta device.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{name} is on the meta device. Give the model memory first: model.to_empty(device=...).")
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        std = init_std(name)
        drawn = torch.empty(parameter.shape)
        nn.init.trunc_normal_(drawn, std=std, a=-cutoff * std, b=cutoff * std, generator=_generator(seed, name))
        parameter.copy_(like(drawn, parameter))


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def count_parameters(model: nn.Module) -> int:
    """Trainable numbers, the tied embedding counted once.

    Embedding, norms, layers, the head's dense matrix and norm, and the decoder's bias: 149,655,232 for ModernBERT-base
    and 395,881,664 for large. The paper rounds these to 149 M and 395 M. Works on the meta device.
    """
    return sum(parameter.numel() for parameter in model.parameters())
