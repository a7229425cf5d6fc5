"""config.json, the file that describes the weights in a folder, and helpers to read its keys."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from modernbert_train.config.model import MAX_LAYERS, MAX_WIDTH
from modernbert_train.config.objective import Order
from modernbert_train.config.read import shown
from modernbert_train.config.schema import ModelConfig, ObjectiveConfig
from modernbert_train.core.files import os_errors_as
from modernbert_train.core.read_json import read_json
from modernbert_train.core.version import __version__
from modernbert_train.errors import DataError

CONFIG_JSON, ADAPTER_JSON = "config.json", "adapter_config.json"  # the second of peft
PREDICTS_FROM, BEFORE = "predicts_from", "before"  # this program's key, and its value if the token before predicts
PAIR_HEAD = "pair_head"  # name of the module `PairHead`
# ModelConfig -> config.json, in most formats
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
}
# config.json's names of activations -> names here; the first of each is written
ACTIVATIONS: dict[str, Literal["gelu", "gelu_tanh"]] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


class Described(NamedTuple):
    """Description of a model by its config.json.

    Attributes:
        model: the architecture. Keys that only concern training may be missing in the file, and then have defaults.
        max_tokens: longest sequence.
        order: which tokens each token sees; causal is a decoder.
        detects: True for a replaced-token detector.
        objective: for labelled models and encoders without a head; None: it predicts tokens or detects replaced ones.
    """

    model: ModelConfig
    max_tokens: int
    order: Order
    detects: bool = False
    objective: ObjectiveConfig | None = None


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        DataError: the file is missing, cut short or not a JSON object.
    """
    with os_errors_as(DataError, f"{path}: cannot be read", "Restore it from a copy.", ValueError):
        content = read_json(path)
    if not isinstance(content, dict):
        raise DataError(f"{path}: not a JSON object. Restore it from a copy.")
    return content


def number_under(
    raw: Mapping[str, Any],
    key: str,
    default: float,
    where: str,
    *,
    least: float | None = None,
    most: float = MAX_WIDTH,
) -> float:
    """Return the number under a key; a whole number if the default is one.

    Args:
        raw: content of a config.json.
        key: its key; a number of layers has a lower bound.
        default: value of a missing key.
        where: name of the file in messages.
        least, most: bounds; least None: above 0.

    Raises:
        DataError: the value is not such a number.
    """
    value = default if raw.get(key) is None else raw[key]
    kinds = (int,) if isinstance(default, int) else (int, float)
    most = MAX_LAYERS if key in ("num_hidden_layers", "n_layer", "n_layers") else most
    enough = isinstance(value, kinds) and (value > 0 if least is None else value >= least)
    if isinstance(value, bool) or not enough or value > most:
        bound = "above 0" if least is None else f"from {least:,}"
        whole = "whole number" if kinds == (int,) else "number"
        raise DataError(
            f"{where}: {key}={shown(value)}, not a {whole} {bound} and up to {most:,}. Restore the file from a copy."
        )
    return value


def numbers_under(raw: dict[str, Any], keys: Mapping[str, str], defaults: Any, where: str) -> dict[str, Any]:
    """Return the numbers of `keys`, from names here to names there; `defaults` is a configuration or its class."""
    return {ours: number_under(raw, theirs, getattr(defaults, ours), where) for ours, theirs in keys.items()}


def share_under(raw: dict[str, Any], key: str, default: float, where: str) -> float:
    """Return a dropout rate."""
    return float(number_under(raw, key, default, where, least=0.0, most=0.999))


def one_of(raw: dict[str, Any], key: str, default: str, known: Collection[str], where: str) -> str:
    """Return the word under a key.

    Raises:
        DataError: it is not in `known`.
    """
    value = default if raw.get(key) is None else raw[key]
    if not isinstance(value, str) or value not in known:
        raise DataError(
            f"{where}: {key}={shown(value)}; this encoder only knows {', '.join(known)}. Name another model."
        )
    return value


def require_class(raw: dict[str, Any], where: str, model_type: str, *classes: str) -> None:
    """Refuse a config.json of another model_type, or without one of these classes of transformers.

    Raises:
        DataError: names the readable ones.
    """
    kind, named = raw.get("model_type"), raw.get("architectures")
    if kind != model_type or not isinstance(named, list) or not any(each in named for each in classes):
        choices = " or ".join(f"architectures=['{each}']" for each in classes)
        raise DataError(
            f"{where}: model_type={shown(kind)}, architectures={shown(named)}; only model_type={model_type}, {choices} "
            "can be read. Name such a model."
        )


def require_fixed(raw: dict[str, Any], fixed: Mapping[str, Any], where: str) -> None:
    """Refuse options that the encoder implements with one value only.

    Raises:
        DataError: names the key.
    """
    for key, value in fixed.items():
        if raw.get(key) not in (None, value):
            raise DataError(f"{where}: {key}={shown(raw[key])}; this encoder only knows {value}. Name another model.")
    if raw.get("pruned_heads"):
        raise DataError(f"{where}: pruned_heads={shown(raw['pruned_heads'])}; this encoder has all. Name another.")


def require_whole_heads(
    config: ModelConfig, where: str, width: str = "hidden_size", heads: str = "num_attention_heads"
) -> None:
    """Refuse a width that heads do not divide; `width` and `heads` are their keys.

    Raises:
        DataError: names both.
    """
    if config.hidden_size % config.num_heads:
        raise DataError(
            f"{where}: {width}={config.hidden_size} is not a multiple of {heads}={config.num_heads}. Restore the file "
            "from a copy."
        )


def require_possible(config: ModelConfig, where: str) -> None:
    """Raise DataError for a combination of keys that `check` refuses as well."""
    if problem := next(config.mistakes(), None):
        raise DataError(f"{where}: {problem} Restore the file from a copy, or name another model.")


def places(name: str, layer: str, parts: Mapping[str, tuple[str, ...]], outside: Mapping[str, str]) -> tuple[str, ...]:
    """Return transformers' names of a parameter by tables of names or of modules; empty if they lack it.

    Args:
        name: the name here.
        layer: transformers' name of a layer, up to its number.
        parts: within a layer, here -> in transformers, along the rows.
        outside: the same outside layers.
    """
    number, _, part = name.removeprefix("model.layers.").partition(".")
    if part and name.startswith("model.layers."):
        table, name, prefix = parts, part, f"{layer}{number}."
    else:
        table, prefix = {ours: (named,) for ours, named in outside.items()}, ""
    module, _, end = name.rpartition(".")
    found = table.get(name) or tuple(f"{each}.{end}" for each in table.get(module, ()))
    return tuple(prefix + each for each in found)


def head_of(
    architecture: str, model_type: str, config: ModelConfig, keys: Mapping[str, str], fixed: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the first keys of a config.json: its class, the numbers of `keys`, and `fixed`."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "exported_by": f"modernbert_train {__version__}",
        "dtype": "float32",
        **{theirs: getattr(config, ours) for ours, theirs in keys.items()},
        **fixed,
    }


def activation_name(activation: str) -> str:
    """Return transformers' name of an activation."""
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == activation)
