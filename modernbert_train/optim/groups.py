"""Which weights decay: matrices do, norms and biases do not.

The rule looks at shapes, not at module types, so that it holds for every model: a parameter with at most one dimension
(norm weights, biases) or called a bias is not decayed. Embeddings and the decoder tied to them are, as in the release.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trainable parameters of a model into param groups for an optimizer.

    Args:
        model: parameters shared by several modules are taken once, under the first name.
        weight_decay: of the decayed group, in the optimizer's own unit.

    Returns:
        The decayed group, then the undecayed one; an empty group is left out. Besides `params` and `weight_decay` each
        carries `param_names`, in the order of `params`, and `decays`, by which a later change of the decay finds it.
    """
    named: dict[bool, dict[str, nn.Parameter]] = {True: {}, False: {}}
    for name, param in model.named_parameters():
        if param.requires_grad:
            decays = param.ndim > 1 and name.rpartition(".")[2] != "bias"
            named[decays][name] = param
    return [
        {
            "params": list(members.values()),
            "param_names": list(members),
            "decays": decays,
            "weight_decay": weight_decay if decays else 0.0,
        }
        for decays, members in named.items()
        if members
    ]
