"""Gather the state of a training run from a Composer Trainer as whole tensors, and load it back.

A checkpoint may have been written by any number of ranks, sharded or not. Loading reads it by rows: each rank of a
sharded model reads only its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from modernbert_train.core.tensor_files import StoredTensors
from modernbert_train.errors import ConfigError
from modernbert_train.models.sharding import held_rows, like, with_rows
from modernbert_train.weights.shares import moments_of, weights_of


def gather_weights(model: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """Gather every parameter, whole and on the CPU, tied ones once. Collective; only ranks with `keep` get tensors."""
    return _gather(weights_of(model), keep)


def gather_optimizer(model: nn.Module, optimizer: Optimizer, *, keep: bool) -> dict[str, Tensor]:
    """Gather optimizer state as `<key>/<parameter name>`, moments whole, step counts as scalars. A collective."""
    return _gather(moments_of(model, optimizer), keep)


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
def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load weights into a model, sharded or not; from a file each rank reads only the rows it holds.

    Raises:
        ConfigError: names or shapes differ; the model is then unchanged.
    """
    targets = dict(model.named_parameters())
    shapes = _shapes_of(weights)
    wrong = [f"{name}: in the checkpoint only" for name in weights.keys() - targets.keys()]
    wrong += [f"{name}: in the model only" for name in targets.keys() - weights.keys()]
    wrong += [
        f"{name}: {list(shapes[name])} in the checkpoint, {list(target.shape)} in the model"
        for name, target in targets.items()
        if name in shapes and shapes[name] != tuple(target.shape)
    ]
    if wrong:
        raise ConfigError(
            "the checkpoint is of another model:\n  " + "\n  ".join(sorted(wrong)) + "\nUse the model: section it had."
        )
    for name, target in targets.items():
        target.copy_(_read(weights, name, target))


@torch.no_grad()
def load_optimizer(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Tensor]) -> None:
    """Load optimizer state from whole or stored tensors; parameters without state in the checkpoint stay fresh."""
    shapes = _shapes_of(state)
    for name, parameter, keys in _states(model, state):
        optimizer.state[parameter] = {
            key: _read(state, f"{key}/{name}", parameter)
            if shapes[f"{key}/{name}"]
            else _number(state[f"{key}/{name}"], parameter if optimizer.defaults.get("fused") else None)
            for key in keys
        }


def _shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    if isinstance(tensors, StoredTensors):
        return tensors.shapes
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _read(tensors: Mapping[str, Tensor], name: str, target: Tensor) -> Tensor:
    """Return a stored tensor on the device and in the sharding and dtype of its parameter."""
    if isinstance(tensors, StoredTensors) and isinstance(target, DTensor):
        return with_rows(tensors.rows(name, *held_rows(target)), target)
    return like(tensors[name], target)


def _number(value: Tensor, parameter: Tensor | None) -> Tensor | int:
    """Return a step count: torch's float tensor, for fused kernels on the parameter's device; this program's as int."""
    if not value.is_floating_point():
        return int(value)
    return value if parameter is None else value.to(parameter.device)


def _states(model: nn.Module, state: Mapping[str, Tensor]) -> Iterator[tuple[str, nn.Parameter, list[str]]]:
    kinds: dict[str, list[str]] = {}
    for entry in sorted(state):
        key, _, name = entry.partition("/")
        kinds.setdefault(name, []).append(key)
    for name, parameter in model.named_parameters():
        if name in kinds:
            yield name, parameter, kinds[name]
