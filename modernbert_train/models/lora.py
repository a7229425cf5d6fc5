"""Low-rank adapters: the encoder keeps its weights, and each linear layer gets a small product of two matrices.

An adapted layer computes W x + b + scale * B A dropout(x), with A of `rank` rows and B of `rank` columns, B zero at the
start (Hu et al. 2021, arXiv:2106.09685). Names and scale are as in peft, so that an adapter can be stored as peft
stores it; the parameters of the base model keep their names.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from modernbert_train.config.classify import LORA_A, LORA_B, LoraConfig
from modernbert_train.errors import ConfigError
from modernbert_train.models.casts import Linear


class LoraLinear(Linear):
    """A linear layer with an adapter.

    Args:
        base: the layer; its parameters are used, not copied.
        lora: rank, scale and dropout.
    """

    def __init__(self, base: nn.Linear, lora: LoraConfig) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.scale, self.dropout = lora.scale, lora.dropout
        self.lora_A = Linear(base.in_features, lora.rank, bias=False)
        self.lora_B = Linear(lora.rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # F.dropout, since a phase sets the rate of every nn.Dropout of an encoder to the model's
        added = self.lora_B(self.lora_A(F.dropout(x, self.dropout, self.training)))
        return super().forward(x) + added * self.scale


def add_adapters(layers: nn.Module, lora: LoraConfig) -> None:
    """Replace linear layers by adapted ones, in place.

    Args:
        layers: of an encoder.
        lora: `targets` are last parts of their names; none means every linear layer.

    Raises:
        ConfigError: a target is no linear layer of this encoder; names those that are.
    """
    linears = {name: module for name, module in layers.named_modules() if isinstance(module, nn.Linear)}
    endings = {name.rpartition(".")[2] for name in linears}
    if unknown := [name for name in lora.targets if name not in endings]:
        raise ConfigError(
            f"objective.lora.targets={', '.join(unknown)}: no linear layer of this encoder has such a name. Choose "
            f"from {', '.join(sorted(endings))}, or leave targets out, which adapts all of them."
        )
    for name, linear in linears.items():
        owner, _, last = name.rpartition(".")
        if not lora.targets or last in lora.targets:
            setattr(layers.get_submodule(owner), last, LoraLinear(linear, lora))


def merge_adapters(weights: Mapping[str, Tensor], lora: LoraConfig) -> dict[str, Tensor]:
    """Return the weights of the equivalent plain model, W + scale * B A."""
    merged = {name: tensor for name, tensor in weights.items() if not name.endswith((LORA_A, LORA_B))}
    for name in (name.removesuffix(LORA_A) for name in weights if name.endswith(LORA_A)):
        product = weights[name + LORA_B] @ weights[name + LORA_A]
        merged[f"{name}.weight"] = merged[f"{name}.weight"] + lora.scale * product
    return merged
