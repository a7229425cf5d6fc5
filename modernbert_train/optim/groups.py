"""Parameter groups: matrices and embeddings decay, norms and biases do not.

The rule uses shapes and nn.Embedding only, so it holds for every model: a parameter with at most one dimension (norm
weights, biases) or named a bias is not decayed. Embeddings and decoders are, tied or not, as in the release. Modules
declare one further fact: `stacked`, the number of matrices stacked along the rows of a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn


@dataclass(frozen=True)
class Weight:
    """A trainable parameter of a model.

    Attributes:
        name: the first one, if several modules share it.
        parameter: the parameter.
        kind: an embedding (or decoder), a matrix, or a vector: a norm's weight or a bias.
        parts: number of matrices of equal shape stacked along its rows, such as the three of Wqkv.
    """

    name: str
    parameter: nn.Parameter
    kind: Literal["matrix", "embedding", "vector"]
    parts: int = 1


def weights_of(model: nn.Module) -> list[Weight]:
    """Return the trainable parameters of a model, each once."""
    modules = dict(model.named_modules())
    embeddings = {id(module.weight) for module in modules.values() if isinstance(module, nn.Embedding)}
    return [
        _weight(name, parameter, modules, embeddings)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def _weight(name: str, parameter: nn.Parameter, modules: dict[str, nn.Module], embeddings: set[int]) -> Weight:
    owner, _, last = name.rpartition(".")
    if parameter.ndim <= 1 or last == "bias":
        return Weight(name, parameter, "vector")
    if id(parameter) in embeddings or owner.rpartition(".")[2] == "decoder":
        return Weight(name, parameter, "embedding")
    block, _, module = owner.rpartition(".")
    return Weight(name, parameter, "matrix", getattr(modules[block], "stacked", {}).get(module, 1))


def param_group(
    weights: Sequence[Weight], weight_decay: float, *, lr_ratio: float = 1.0, decay_ratio: float = 1.0, **own: Any
) -> dict[str, Any]:
    """Return a param group of these weights.

    Args:
        weights: of the group.
        weight_decay: of the run, in the optimizer's unit.
        lr_ratio, decay_ratio: the group's rate and decay relative to the run's; `apply_clock` multiplies by them.
        own: more keys of the group.

    Returns:
        The above, and `param_names` in the order of `params`.
    """
    return {
        "params": [weight.parameter for weight in weights],
        "param_names": [weight.name for weight in weights],
        "lr_ratio": lr_ratio,
        "decay_ratio": decay_ratio,
        "weight_decay": decay_ratio * weight_decay,
        **own,
    }


def decay_groups(weights: Sequence[Weight], weight_decay: float) -> list[dict[str, Any]]:
    """Return a group of decayed weights and one of the rest, without empty groups. See `param_group`."""
    decayed = [weight for weight in weights if weight.kind != "vector"]
    vectors = [weight for weight in weights if weight.kind == "vector"]
    groups = (param_group(decayed, weight_decay), param_group(vectors, weight_decay, decay_ratio=0.0))
    return [group for group in groups if group["params"]]
