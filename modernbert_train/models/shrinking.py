"""A smaller model out of a larger one: some of its layers, evenly from first to last, and all that is not in layers.

Of 12 layers the 6 are 0, 2, 4, 7, 9 and 11, those of DistilBERT's published code. Global layers come from global ones.
Tensors are copied bit for bit, with one exception: a DistilBERT out of a BERT has no token types, so the vector of the
first type, which BERT adds to every token, is added to the positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from modernbert_train.config.knob import architecture_keys
from modernbert_train.config.schema import ModelConfig
from modernbert_train.errors import ConfigError
from modernbert_train.models.tiling import layer_sources

_TYPES = "model.embeddings.segment_embeddings.weight"
_POSITIONS = "model.embeddings.position_embeddings.weight"
_LAYERS = "model.layers."


def kept_layers(old: ModelConfig, new: ModelConfig) -> list[int]:
    """For each layer of the smaller model the one of the larger that it is."""
    return layer_sources(old, new, "fitted")


def check_shrinking(old: ModelConfig, new: ModelConfig, key: str) -> None:
    """Whether one is the other with fewer layers; `key` is what named the larger.

    Raises:
        ConfigError: it is not; names what differs, with both values.
    """
    if not new.shrinks_from(old):
        raise ConfigError(
            f"{key}: model.name={new.name} here, {old.name} there; layers are taken from a model of the same kind, or "
            "for a distilbert from a bert. Name such a model, or begin from scratch and set objective.name=distill."
        )
    wrong = [
        f"model.{name}={getattr(new, name)} here, {getattr(old, name)} there"
        for name in architecture_keys(new)
        if name not in ("name", "num_layers") and getattr(new, name) != getattr(old, name)
    ]
    if new.drops_types_of(old) and old.position_offset:
        wrong.append(f"model.name=distilbert, whose positions count from 0; there from {old.position_offset}")
    if old.num_layers <= new.num_layers:
        wrong.append(f"model.num_layers={new.num_layers} here, {old.num_layers} there: set fewer")
    if old.unit_passes != (1,) * old.num_layers:
        wrong.append("its layers share weights, so that fewer of them are no smaller model")
    if wrong:
        raise ConfigError(
            f"{key}: a smaller model has fewer layers, and all else is the same:\n  "
            + "\n  ".join(wrong)
            + "\nSet what it has, or name another model."
        )


def shrink_each(weights: Mapping[str, Tensor], old: ModelConfig, new: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of the smaller model under its name; the tied decoder's too, if it is there.

    Args:
        weights: of the larger model, by name.
        old, new: see `check_shrinking`.
    """
    sources = kept_layers(old, new)
    for name, tensor in weights.items():
        if name.startswith(_LAYERS):
            number, _, rest = name.removeprefix(_LAYERS).partition(".")
            for layer in (layer for layer, source in enumerate(sources) if source == int(number)):
                yield f"{_LAYERS}{layer}.{rest}", tensor
        elif not new.drops_types_of(old):
            yield name, tensor
        elif name != _TYPES:
            yield name, tensor + weights[_TYPES][0] if name == _POSITIONS else tensor
