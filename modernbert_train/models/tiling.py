"""Grow a larger model from a smaller one by center tiling (arXiv 2412.13663, section 2.3 and appendix B).

For each axis of a matrix, an index gives the source position of every target position: the old values are in the
middle and repeat around it. Growing a weight is therefore two gathers. The modes differ only in these indices and in
the source layers:

- `paper` is the published mapping. It may cut through a head, and chooses layers by depth alone, so that
  12 of large's 28 layers are copied from a layer of the other attention kind. The final norm stays at ones.
- `fitted` keeps heads whole, copies each layer from one of the same kind, and tiles the final norm too.

Values are copied, never rescaled, as in the release.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from modernbert_train.config.schema import ModelConfig, ModernBertConfig
from modernbert_train.errors import ConfigError
from modernbert_train.models.modernbert import ModernBertForMaskedLM

Mode = Literal["fitted", "paper"]

GROWING = ("hidden_size", "num_layers", "num_heads", "intermediate_size")
EQUAL = ("vocab_size", "head_size", "global_attn_every_n_layers", "local_attention", "norm_eps")
FITTED = "Set weights.grow_mode=fitted."
EMBEDDING, DECODER = "model.embeddings.tok_embeddings.weight", "decoder.weight"

# suffix of a parameter's name -> axes of its rows and columns; * n: n matrices are stacked along the rows
AXES = {
    "tok_embeddings.weight": ("vocabulary", "width"),
    "attn.Wqkv.weight": ("heads * 3", "width"),
    "attn.Wo.weight": ("width", "heads"),
    "mlp.Wi.weight": ("hidden * 2", "width"),
    "mlp.Wo.weight": ("width", "hidden"),
    "head.dense.weight": ("width", "width"),
    "norm.weight": ("width",),
    "decoder.bias": ("vocabulary",),
}


def grow(
    weights: Mapping[str, Tensor], old: ModernBertConfig, new: ModernBertConfig, mode: Mode = "fitted"
) -> dict[str, Tensor]:
    """Return the state dict of a larger model, complete for load_state_dict(strict=True).

    Args:
        weights: of the smaller model, by name; the tied decoder.weight may be left out.
        old, new: the two architectures.
        mode: see the module.

    Raises:
        ConfigError: see `check_growth`.
    """
    grown = dict(grow_each(weights, old, new, mode))
    return grown | {DECODER: grown[EMBEDDING]}


def grow_each(
    weights: Mapping[str, Tensor], old: ModernBertConfig, new: ModernBertConfig, mode: Mode = "fitted"
) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter of the larger model by name, one at a time to save memory; tied parameters once.

    Raises:
        ConfigError: see `check_growth`.
    """
    check_growth(old, new, mode)
    index = _index(old, new, mode)
    sources = layer_sources(old, new, mode)
    with torch.device("meta"):
        names = [name for name, _ in ModernBertForMaskedLM(new).named_parameters()]
    for name in names:
        source = _source_name(name, sources)
        if source == "model.layers.0.attn_norm.weight" or (mode == "paper" and name == "model.final_norm.weight"):
            yield name, torch.ones(new.hidden_size)  # as initialised; layer 0 lacks a norm to copy
            continue
        tensor = weights[source]
        for dim, axis in enumerate(next(AXES[end] for end in AXES if name.endswith(end))):
            tensor = tensor.index_select(dim, index[axis])
        yield name, tensor


def check_growth(old: ModernBertConfig, new: ModernBertConfig, mode: Mode = "fitted") -> None:
    """Raise ConfigError if one architecture cannot grow into another.

    Raises:
        ConfigError: names every dimension that would shrink or may not change, with both values, or the limit of the
            published mapping.
    """
    wrong = [_wrong(name, old, new, "must be the same") for name in EQUAL if getattr(new, name) != getattr(old, name)]
    wrong += [_wrong(name, old, new, "cannot shrink") for name in GROWING if getattr(new, name) < getattr(old, name)]
    if not wrong and mode == "paper":
        if new.hidden_size == old.hidden_size:
            wrong.append(_wrong("hidden_size", old, new, f"the published code refuses an equal width. {FITTED}"))
        if max(layer_sources(old, new, mode)) >= old.num_layers:
            reason = f"the published rounding needs layer {old.num_layers}, and layers count from 0. {FITTED}"
            wrong.append(_wrong("num_layers", old, new, reason))
    elif not wrong and old.num_layers == 1 and new.global_attn_every_n_layers > 1 and new.num_layers > 1:
        wrong.append(_wrong("num_layers", old, new, "the smaller model lacks a local layer to copy from"))
    if wrong:
        raise ConfigError("growing a model:\n  " + "\n  ".join(wrong) + "\nName two models of one family that fit.")


def _wrong(name: str, old: ModernBertConfig, new: ModernBertConfig, reason: str) -> str:
    key = "hidden_size/num_heads" if name == "head_size" else name
    return f"model.{key}={getattr(new, name)}, grown from {getattr(old, name)}: {reason}"


def tiled_index(old_size: int, new_size: int, unit: int = 1) -> Tensor:
    """Return the source position of each of new_size positions: old_size in the middle, repeated around it.

    Args:
        unit: positions that stay together, such as a head's; divides both sizes.

    Returns:
        int64: new[j] = old[(j - o) mod old] with o = (new - old) // 2, counted in units.
    """
    old_units, new_units = old_size // unit, new_size // unit
    start = (new_units - old_units) // 2
    units = (torch.arange(new_units) - start) % old_units
    return (units[:, None] * unit + torch.arange(unit)).flatten()


def layer_sources(old: ModelConfig, new: ModelConfig, mode: Mode) -> list[int]:
    """Return the source layer of each new layer, by depth; `fitted` counts depth among layers of the same kind."""
    if mode == "paper":
        return [round(layer * old.num_layers / new.num_layers) for layer in range(new.num_layers)]  # banker's rounding
    sources = [0] * new.num_layers
    for kind in (True, False):
        old_layers, new_layers = ([i for i in range(c.num_layers) if c.is_global(i) is kind] for c in (old, new))
        for position, layer in enumerate(new_layers):
            sources[layer] = old_layers[spread(position, len(new_layers), len(old_layers))]
    return sources


def spread(position: int, count: int, choices: int) -> int:
    """Return the nearest choice when `count` positions are spread evenly from the first to the last choice.

    The two end choices are repeated least.
    """
    gaps = max(1, count - 1)
    return (2 * position * (choices - 1) + gaps) // (2 * gaps)


def _source_name(name: str, sources: list[int]) -> str:
    if not name.startswith("model.layers."):
        return name
    _, _, layer, suffix = name.split(".", 3)
    return f"model.layers.{sources[int(layer)]}.{suffix}"


def _index(old: ModernBertConfig, new: ModernBertConfig, mode: Mode) -> dict[str, Tensor]:
    """Return, for each axis of AXES, the source index of every target position."""
    heads = tiled_index(old.hidden_size, new.hidden_size, new.head_size if mode == "fitted" else 1)
    hidden = tiled_index(old.intermediate_size, new.intermediate_size)
    return {
        "vocabulary": torch.arange(old.vocab_size),
        "width": tiled_index(old.hidden_size, new.hidden_size),
        "heads": heads,
        "heads * 3": torch.cat([heads + part * old.hidden_size for part in range(3)]),
        "hidden": hidden,
        "hidden * 2": torch.cat([hidden + part * old.intermediate_size for part in range(2)]),
    }
