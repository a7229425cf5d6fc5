"""Shrink a larger model: keep some of its layers, heads, channels and hidden units, evenly spaced from first to last.

6 of 12 layers are 0, 2, 4, 7, 9 and 11, as in DistilBERT's published code; ModernBERT's global layers are copied from
global ones. Channels and hidden units are chosen by weight selection (Xu et al. 2024, arXiv 2311.18823: uniform), but
heads stay whole, and channels are kept head by head. Tensors are copied, never rescaled, with one
exception: DistilBERT lacks token types, so the vector of BERT's first type, which BERT adds to every token, is added
to the positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from modernbert_train.config.knob import architecture_keys
from modernbert_train.config.schema import BertConfig, DistilBertConfig, MaskedLmConfig, ModelConfig
from modernbert_train.errors import ConfigError
from modernbert_train.models.build import shapes_of
from modernbert_train.models.tiling import DECODER, EMBEDDING, layer_sources, spread

SHRINKING = ("num_layers", "hidden_size", "num_heads", "intermediate_size")
# kinds that are a smaller model of another kind too: a DistilBERT is a BERT without token types
SMALLER: dict[type[ModelConfig], tuple[type[ModelConfig], ...]] = {DistilBertConfig: (BertConfig,)}
_TYPES = "model.embeddings.segment_embeddings.weight"
_POSITIONS = "model.embeddings.position_embeddings.weight"
_LAYERS = "model.layers."


def kept_layers(old: ModelConfig, new: ModelConfig) -> list[int]:
    """Return, for each layer of the smaller model, its source layer in the larger one."""
    return layer_sources(old, new, "fitted")


def drops_types(old: ModelConfig, new: ModelConfig) -> bool:
    """True if the larger model has token types and the smaller one lacks them."""
    return old.segments > 0 and new.segments == 0


def check_shrinking(old: ModelConfig, new: ModelConfig, key: str) -> None:
    """Raise ConfigError unless `new` is `old` with fewer layers or narrower; `key` is the option that named `old`.

    Raises:
        ConfigError: names the differences, with both values.
    """
    if type(old) is not type(new) and type(old) not in SMALLER.get(type(new), ()):
        raise ConfigError(
            f"{key}: model.name={new.name} here, {old.name} there; weights are taken from a model of the same kind, or "
            "for a distilbert from a bert. Name such a model, or begin from scratch and set objective.name=distill."
        )
    wrong = [
        _both_values(name, old, new)
        for name in architecture_keys(new)
        if name not in ("name", *SHRINKING) and getattr(new, name) != getattr(old, name)
    ]
    wrong += [
        f"{_both_values(name, old, new)}: set no more" for name in SHRINKING if getattr(new, name) > getattr(old, name)
    ]
    if not wrong and all(getattr(new, name) == getattr(old, name) for name in SHRINKING):
        wrong.append(f"{_both_values('num_layers', old, new)}, and the same width: set fewer")
    if drops_types(old, new) and (offset := cast(BertConfig, old).position_offset):
        wrong.append(f"model.name=distilbert counts positions from 0, the larger model from {offset}")
    if old.unit_passes != (1,) * old.num_layers:
        wrong.append("its layers share weights, so fewer layers do not make a smaller model")
    if not wrong:
        wrong += _wrong_width(old, new)
    if wrong:
        raise ConfigError(
            f"{key}: a smaller model has fewer layers or is narrower, and is otherwise the same:\n  "
            + "\n  ".join(wrong)
            + "\nSet the larger model's values, or name another model."
        )


def shrink_each(weights: Mapping[str, Tensor], old: ModelConfig, new: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter of the smaller model by name, the tied decoder's too if `weights` has it.

    Args:
        weights: of the larger model, by name.
        old, new: see `check_shrinking`.
    """
    sources, kept = kept_layers(old, new), _kept(old, new)
    for name, tensor in weights.items():
        if drops_types(old, new) and name == _POSITIONS:
            tensor = tensor + weights[_TYPES][0]
        for dim, index in kept.get(name, {}).items():
            tensor = tensor.index_select(dim, index)
        if name.startswith(_LAYERS):
            number, _, suffix = name.removeprefix(_LAYERS).partition(".")
            for layer in (layer for layer, source in enumerate(sources) if source == int(number)):
                yield f"{_LAYERS}{layer}.{suffix}", tensor
        elif not (drops_types(old, new) and name == _TYPES):
            yield name, tensor


def _both_values(name: str, old: ModelConfig, new: ModelConfig) -> str:
    return f"model.{name}={getattr(new, name)} here, {getattr(old, name)} there"


def _wrong_width(old: ModelConfig, new: ModelConfig) -> Iterator[str]:
    if new.hidden_size == old.hidden_size and new.num_heads == old.num_heads:
        return
    each = old.hidden_size // old.num_heads
    if old.attention_width != old.hidden_size or old.kv_heads != old.num_heads:
        yield f"model.name={old.name} with grouped key heads or another head width: only its layers can be taken"
    elif new.hidden_size != new.num_heads * each:
        yield (
            f"model.hidden_size={new.hidden_size} with model.num_heads={new.num_heads}: heads are kept whole, and the "
            f"larger model's are {each} wide; set model.num_heads={max(1, new.hidden_size // each)}"
        )
    elif old.embedding_width != old.hidden_size:
        yield f"embeddings of width {old.embedding_width}, narrower than the larger model: only its layers can be taken"


def _kept(old: ModelConfig, new: ModelConfig) -> dict[str, dict[int, Tensor]]:
    """Return the kept indices by parameter of the larger model and by dimension that shrinks.

    To find which dimensions run over channels and which over hidden units, change one size at a time and compare the
    shapes. Stacked matrices lie one after the other.
    """
    kept: dict[str, dict[int, Tensor]] = {}
    width: dict[str, Any] = {"hidden_size": new.hidden_size, "num_heads": new.num_heads}
    before = shapes_of(old, MaskedLmConfig())
    inner: dict[str, Any] = {"intermediate_size": new.intermediate_size}
    for changes, unit in ((width, old.hidden_size // old.num_heads), (inner, 1)):
        key, size = next(iter(changes.items()))
        old_size = getattr(old, key)
        if size == old_size:
            continue
        index = evenly(old_size, size, unit)
        for name, shape in shapes_of(replace(old, **changes), MaskedLmConfig()).items():
            for dim, (many, few) in enumerate(zip(before[name], shape, strict=True)):
                if many == few:
                    continue
                num_stacked = many // old_size
                if num_stacked * old_size == many:
                    kept.setdefault(name, {})[dim] = torch.cat([index + part * old_size for part in range(num_stacked)])
                else:
                    assert many == old.num_heads, f"{name}: {many} is no multiple of {key}"
                    kept.setdefault(name, {})[dim] = evenly(many, few)
    if EMBEDDING in kept:
        kept.setdefault(DECODER, kept[EMBEDDING])  # used if `weights` holds the tied decoder
    return kept


def evenly(many: int, few: int, unit: int = 1) -> Tensor:
    """Return (int64) which of `many` are kept, evenly from the first to the last; `unit` of them stay together."""
    units = torch.tensor([spread(unit_index, few // unit, many // unit) for unit_index in range(few // unit)])
    return (units[:, None] * unit + torch.arange(unit)).flatten()
