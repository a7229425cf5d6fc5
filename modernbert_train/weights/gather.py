"""The state of a training run as whole tensors: out of a Composer Trainer, and back into one.

Tensors are gathered whole, so a checkpoint does not know how many ranks wrote it, nor whether weights were sharded:
it can go on under another strategy and another number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from modernbert_train.errors import ConfigError
from modernbert_train.models.sharding import like


def gather_weights(model: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """Every parameter by name, whole and on the CPU, tied ones once. A collective; only ranks that keep get tensors."""
    return _gather(model.named_parameters(), keep)


def gather_optimizer(model: nn.Module, optimizer: Optimizer, *, keep: bool) -> dict[str, Tensor]:
    """Optimizer state as `<key>/<parameter name>`, moments whole, step counts as scalars. A collective, as above."""
    entries = (
        (f"{key}/{name}", value if isinstance(value, Tensor) else torch.tensor(value))
        for name, parameter in model.named_parameters()
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
    )
    return _gather(entries, keep)


def _gather(entries: Iterable[tuple[str, Tensor]], keep: bool) -> dict[str, Tensor]:
    gathered = {}
    for name, tensor in entries:
        tensor = tensor.detach()
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if keep:
            gathered[name] = tensor.to("cpu", copy=True).contiguous()
    return gathered


@torch.no_grad()
def load_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Fill a model, sharded or not, from whole tensors.

    Raises:
        ConfigError: names or shapes differ; the model is then unchanged.
    """
    targets = dict(model.named_parameters())
    wrong = [f"{name}: in the checkpoint only" for name in weights.keys() - targets.keys()]
    wrong += [f"{name}: in the model only" for name in targets.keys() - weights.keys()]
    wrong += [
        f"{name}: {list(weights[name].shape)} in the checkpoint, {list(target.shape)} in the model"
        for name, target in targets.items()
        if name in weights and weights[name].shape != target.shape
    ]
    if wrong:
        raise ConfigError(
            "the checkpoint is of another model:\n  " + "\n  ".join(sorted(wrong)) + "\nUse the model: section it had."
        )
    for name, target in targets.items():
        target.copy_(like(weights[name], target))


@torch.no_grad()
def load_optimizer(model: nn.Module, optimizer: Optimizer, state: dict[str, Tensor]) -> None:
    """Fill an optimizer from whole tensors; parameters without state in the checkpoint stay fresh."""
    for name, parameter, keys in _states(model, state):
        optimizer.state[parameter] = {key: _restored(state[f"{key}/{name}"], parameter) for key in keys}


def _restored(value: Tensor, parameter: Tensor) -> Tensor | int:
    if value.ndim:
        return like(value, parameter)
    return value if value.is_floating_point() else int(value)  # torch counts steps in a float tensor, we in an int


def _states(model: nn.Module, state: dict[str, Tensor]) -> Iterator[tuple[str, nn.Parameter, list[str]]]:
    kinds: dict[str, list[str]] = {}
    for entry in sorted(state):
        key, _, name = entry.partition("/")
        kinds.setdefault(name, []).append(key)
    for name, parameter in model.named_parameters():
        if name in kinds:
            yield name, parameter, kinds[name]
