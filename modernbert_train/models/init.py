"""Initial weights: "full_megatron", the initialisation of the released models (arXiv 2412.13663, appendix A).

Each parameter is drawn by a generator seeded with the run's seed and the parameter's name. A value therefore does not
depend on the order of drawing, on the number of ranks, or on the model's other parameters.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from modernbert_train.config.classify import LORA_A, LORA_B
from modernbert_train.config.schema import ModelConfig
from modernbert_train.models.encoder import OnEncoder
from modernbert_train.models.sharding import like


def module_of(name: str) -> str:
    """Return the first part of a parameter's name: model, decoder or a head; adapters count as a separate module."""
    return "adapters" if name.endswith((LORA_A, LORA_B)) else name.partition(".")[0]


@torch.no_grad()
def initialize(model: nn.Module, config: ModelConfig, seed: int, only: tuple[str, ...] | None = None) -> None:
    """Fill every parameter in place: matrices truncated normal, norms one, biases zero.

    An inner model, such as a generator, uses its own configuration. Differences (gdes) are zero.

    Matrices have mean 0 and the standard deviation that the configuration gives their name, truncated at init_cutoff
    deviations. Truncation at 2 leaves 0.88 of the deviation, as in the release. A tied parameter is drawn once, under
    its first name.

    Parameters may be full tensors on any device, or FSDP2 shards: each rank draws every tensor in full, one at a time,
    and keeps its shard. A model that is built on the meta device, sharded and then allocated (`to_empty`) gets the same
    weights as any other, and no rank ever holds all of it.

    Args:
        model: of any architecture, with any heads.
        config: the architecture.
        seed: of the run.
        only: modules to fill, see `module_of`; None is all.

    Raises:
        ValueError: a parameter is still on the meta device.
    """
    inner = {
        f"{name}.": module.config for name, module in model.named_modules() if name and isinstance(module, OnEncoder)
    }
    for name, parameter in model.named_parameters():
        if only is not None and module_of(name) not in only:
            continue
        if parameter.is_meta:
            raise ValueError(f"{name} is on the meta device. Give the model memory first: model.to_empty(device=...).")
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        if name.endswith(("delta.weight", LORA_B)):  # a difference from another table, or from a weight
            parameter.zero_()
            continue
        own = next((its for prefix, its in inner.items() if name.startswith(prefix)), config)
        std, cutoff = own.init_of(name)
        drawn, generator = torch.empty(parameter.shape), _generator(seed, name)
        if name.endswith(LORA_A):
            bound = parameter.shape[1] ** -0.5  # as peft draws it
            nn.init.uniform_(drawn, -bound, bound, generator=generator)
        elif cutoff is None:
            nn.init.normal_(drawn, std=std, generator=generator)
        else:
            nn.init.trunc_normal_(drawn, std=std, a=-cutoff * std, b=cutoff * std, generator=generator)
        parameter.copy_(like(drawn, parameter))


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def count_parameters(model: nn.Module) -> int:
    """Return the number of trainable values, the tied embedding counted once; works on the meta device.

    With embedding, norms, layers, the head's dense matrix and norm, and the decoder's bias, ModernBERT-base has
    149,655,232 and large 395,881,664. The paper rounds these to 149 M and 395 M.
    """
    return sum(parameter.numel() for parameter in model.parameters())
