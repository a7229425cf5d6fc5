"""Convert tensors to the names of a format and back, without rounding.

Heads besides the masked-LM model's are returned if they are stored whole, even if the format cannot store them; the
caller decides about missing and surplus heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from modernbert_train.config.schema import BertConfig, ModelConfig
from modernbert_train.errors import ConfigError, DataError, RunError
from modernbert_train.models.build import all_shapes
from modernbert_train.models.init import module_of
from modernbert_train.weights.formats import HubFormat
from modernbert_train.weights.formats.config_json import CONFIG_JSON
from modernbert_train.weights.formats.electra import TOKEN_HEAD
from modernbert_train.weights.formats.shape import Shape, stored_shape

EMBEDDING, DECODER = "model.embeddings.tok_embeddings.weight", "decoder.weight"
Mistake = Callable[[str], RunError]
Shapes = Mapping[str, tuple[int, ...]]

_WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
MASKED_LM = ("model", "head", "decoder")  # modules of a masked-LM model


def heads_among(names: Iterable[str]) -> tuple[str, ...]:
    """Return the modules besides a masked-LM model's."""
    return tuple(sorted({module_of(name) for name in names} - {*MASKED_LM}))


def places_of(hub: HubFormat, ours: str, config: ModelConfig) -> list[tuple[str, ...]]:
    """Return a parameter's names in a format: its parts along the rows, once for each place that stores it."""
    names = (hub.theirs(name, config.stored) for name in config.stored_names(ours))
    return [parts for parts in names if parts]


def unsupported_heads(hub: HubFormat, names: Iterable[str], config: ModelConfig) -> tuple[str, ...]:
    """Return the heads that the format cannot store."""
    return heads_among(name for name in names if not places_of(hub, name, config))


def to_hf(
    hub: HubFormat, weights: Mapping[str, Tensor], config: ModelConfig, shapes: Shapes | None = None
) -> dict[str, Tensor]:
    """Return a state dict under transformers' names, without the parameters that the format cannot store.

    Args:
        hub: the format.
        weights: of a model with or without further heads; a tied decoder.weight may be present, and is left out.
        config: their architecture.
        shapes: expected shapes; None: the architecture's.

    Raises:
        ConfigError: tensors are missing, unknown or of another shape, or the decoder is not tied.
    """

    def mistake(problem: str) -> ConfigError:
        return ConfigError(f"the model's weights: {problem}. Nothing was exported.")

    modules = {module_of(name) for name in weights}
    modules |= {"model"} if TOKEN_HEAD in modules else {*MASKED_LM}  # a detector, or a masked-LM model
    expected = shapes or {name: shape for name, shape in all_shapes(config).items() if module_of(name) in modules}
    if config.tied and DECODER in weights:
        if EMBEDDING in weights and not torch.equal(weights[DECODER], weights[EMBEDDING]):
            raise mistake(f"{DECODER} is not tied to {EMBEDDING}")
        weights = {name: tensor for name, tensor in weights.items() if name != DECODER}
    _compare(weights, expected, mistake)
    stored = {}
    for ours in expected:
        shape = stored_shape(hub, ours, config)
        for copy, parts in enumerate(places_of(hub, ours, config)):
            for name, part in zip(parts, weights[ours].chunk(len(parts)), strict=True):
                theirs = _to_stored(part, shape)
                stored[name] = theirs.clone(memory_format=torch.contiguous_format) if copy else theirs.contiguous()
    return stored


def from_hf(
    hub: HubFormat,
    stored: Mapping[str, Tensor],
    config: ModelConfig,
    where: str,
    described_by: str = CONFIG_JSON,
    shapes: Shapes | None = None,
) -> dict[str, Tensor]:
    """Return tensors under this program's names, in fp32, with a tied decoder.weight and further heads stored whole.

    Args:
        hub: the format.
        stored: under transformers' names, or older ones.
        config: their expected architecture.
        where, described_by: names of the file and of the source of its architecture in messages.
        shapes: expected shapes, for a config.json with an objective; None: the architecture's.

    Raises:
        DataError: tensors are missing, unknown, of another shape or type, not tied, or differ but are shared here.
    """

    def mistake(problem: str) -> DataError:
        return DataError(f"{where}: {problem}. Name weights that fit the {described_by} there.")

    stored = {_unwrapped(name): tensor for name, tensor in stored.items()}
    tensors: dict[str, Tensor] = {}
    others: dict[str, tuple[str, torch.dtype]] = {}
    copies: Mapping[str, str] = getattr(hub, "tied", {}) if config.tied else {}
    for name, tensor in stored.items():
        now = hub.today(name)
        if now is None:
            continue
        now = copies.get(now, now)
        if not tensor.is_floating_point():  # a buffer, unless it has the name of a weight
            others[now] = name, tensor.dtype
            continue
        if now in tensors and not torch.equal(tensors[now], tensor):  # a second copy must be equal
            copy = (
                name
                if name != now
                else next(each for each in stored if each != now and copies.get(each, hub.today(each)) == now)
            )
            raise mistake(f"{copy} is not tied to {now}")
        tensors[now] = tensor

    optional = shapes is None
    shapes = shapes or all_shapes(config)
    places_by_name = {ours: copies_of for ours in shapes if (copies_of := places_of(hub, ours, config))}
    classes = _names(places_by_name, TOKEN_HEAD)
    # a detector has classes of tokens and no predictions; an encoder may have no head
    no_head = (bool(classes) and all(name in tensors for name in classes)) or getattr(hub, "headless", False)
    for head in [*heads_among(places_by_name), *(("head", "decoder") if no_head else ())] if optional else ():
        if not all(name in tensors for name in _names(places_by_name, head)):
            for name in _names(places_by_name, head):
                tensors.pop(name, None)
            places_by_name = {ours: copies_of for ours, copies_of in places_by_name.items() if module_of(ours) != head}
    part_of = {
        ours: (shapes[ours][0] // len(copies_of[0]), *shapes[ours][1:]) for ours, copies_of in places_by_name.items()
    }
    other = {ours: shape for ours in places_by_name if (shape := stored_shape(hub, ours, config)) is not None}
    expected = {
        name: other[ours].dims if ours in other else part_of[ours]
        for ours, copies_of in places_by_name.items()
        for parts in copies_of
        for name in parts
    }
    if wrong := [others[name] for name in expected if name in others]:
        raise mistake(f"{wrong[0][0]} is of type {wrong[0][1]}")
    _compare(tensors, expected, mistake)
    _compare_copies(tensors, places_by_name.values(), where)
    weights = {}
    for ours, (names, *_) in places_by_name.items():
        shape = other.get(ours)
        if (
            shape is not None
            and shape.zero_rows
            and (mixed := [n for n in names if tensors[n][: shape.zero_rows].any()])
        ):
            raise mistake(f"{mixed[0]} is not zero in the first row")
        parts_here = [_from_stored(tensors[name], shape, part_of[ours]) for name in names]
        weights[ours] = (parts_here[0] if len(names) == 1 else torch.cat(parts_here)).float()
    predicts = config.tied and ("decoder.bias" in weights if config.decoder_bias else optional)
    if getattr(hub, "headless", False) and "head" in {module_of(name) for name in shapes}:
        predicts = predicts and "head" in {module_of(name) for name in weights}
    return weights | {DECODER: weights[EMBEDDING]} if predicts else weights


def _unwrapped(name: str) -> str:
    """Return a name without the modules that torch.compile, DDP, FSDP and activation checkpointing wrap others in."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _names(places_by_name: Mapping[str, Sequence[tuple[str, ...]]], module: str) -> list[str]:
    """Return the stored names of a module."""
    return [
        name for ours in places_by_name if module_of(ours) == module for parts in places_by_name[ours] for name in parts
    ]


def _to_stored(part: Tensor, shape: Shape | None) -> Tensor:
    if shape is None:
        return part
    if shape.zero_rows:
        part = torch.cat([part.new_zeros(shape.zero_rows, *part.shape[1:]), part])
    return (part.t() if shape.transposed else part).reshape(shape.dims)


def _from_stored(part: Tensor, shape: Shape | None, ours: tuple[int, ...]) -> Tensor:
    if shape is None:
        return part
    part = part[shape.zero_rows :]
    return part.reshape(ours[::-1]).t().contiguous() if shape.transposed else part.reshape(ours)


def _compare(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], mistake: Mistake) -> None:
    if missing := sorted(expected.keys() - tensors.keys()):
        raise mistake(f"{len(missing)} of {len(expected)} tensors are missing, the first is {missing[0]}")
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise mistake(f"{len(unknown)} tensors are unknown, the first is {unknown[0]}")
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise mistake(f"{name} has the shape {tuple(tensors[name].shape)} and not {shape}")


def _compare_copies(
    tensors: Mapping[str, Tensor], names_of_copies: Iterable[Sequence[tuple[str, ...]]], where: str
) -> None:
    for first, *others in names_of_copies:
        for parts in others:
            for name, copy in zip(first, parts, strict=True):
                if not torch.equal(tensors[name], tensors[copy]):
                    raise DataError(
                        f"{where}: {copy} differs from {name}, and layers of this model share them. Set sharing to "
                        "share less, or name weights in which they are equal."
                    )


def positions_from_zero(config: BertConfig, weights: Mapping[str, Tensor]) -> tuple[BertConfig, dict[str, Tensor]]:
    """Return the model with positions from 0, as ELECTRA's: the rows before a RoBERTa's first token are cut off."""
    table, rows = "model.embeddings.position_embeddings.weight", config.position_offset
    cut = {name: tensor[rows:] if name == table else tensor for name, tensor in weights.items()}
    return replace(config, position_offset=0), cut
