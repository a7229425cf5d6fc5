"""Rotary positions in a config.json: `rope_parameters` of transformers 5, and the older `rope_scaling` and bases.

Read as transformers 5 reads them: `rope_scaling` wins where both are given.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from modernbert_train.config.model import RotaryConfig
from modernbert_train.config.read_yaml import shown
from modernbert_train.errors import DataError
from modernbert_train.weights.formats.config_json import Content

LAYERS = {True: "full_attention", False: "sliding_attention"}
_LLAMA3 = {
    "rope_factor": "factor",
    "rope_original_tokens": "original_max_position_embeddings",
    "rope_low_freq": "low_freq_factor",
    "rope_high_freq": "high_freq_factor",
}
_YARN = {"rope_beta_fast": "beta_fast", "rope_beta_slow": "beta_slow", "rope_attention_factor": "attention_factor"}
# rope_type -> the keys of its scaling, ours -> theirs
_KEYS: dict[str, dict[str, str]] = {
    "none": {},
    "linear": {"rope_factor": "factor"},
    "llama3": _LLAMA3,
    "yarn": {key: _LLAMA3[key] for key in ("rope_factor", "rope_original_tokens")} | _YARN,
}


def describe(config: RotaryConfig, is_global: bool = True) -> dict[str, Any]:
    """Return the base and the scaling of global or local layers, under the keys of transformers 5."""
    parameters = {"rope_type": "default", "rope_theta": float(config.thetas[is_global])}
    if config.is_scaled(is_global):
        parameters |= {theirs: getattr(config, ours) for ours, theirs in _KEYS[config.rope_scaling].items()}
        parameters["rope_type"] = config.rope_scaling
    return {key: value for key, value in parameters.items() if value is not None}


def describe_layers(config: RotaryConfig) -> dict[str, Any]:
    """Return `rope_parameters` of an encoder with global and local layers."""
    return {kind: describe(config, is_global) for is_global, kind in LAYERS.items()}


def read(raw: Content, theta: float, longest: int) -> tuple[float, dict[str, Any]]:
    """Return the RoPE base and the keys of `RotaryConfig`.

    Args:
        raw: an object with both.
        theta: base if it states none.
        longest: tokens of the longest text, which scaling counts from if the file names no other length.

    Raises:
        DataError: these positions cannot be computed; names them.
    """
    kind = raw.get("rope_type", raw.get("type", "default"))
    kind = "none" if kind == "default" else kind
    is_supported = isinstance(kind, str) and kind in _KEYS
    if not is_supported or raw.get("partial_rotary_factor") not in (None, 1) or raw.get("truncate") not in (None, True):
        raise DataError(
            f"{raw.where}: rope_parameters={shown(raw)}; this encoder knows rope_type default, linear, llama3 and "
            "yarn, of whole heads and with truncate=true. Name another model."
        )
    theta = theta_under(raw, "rope_theta", theta)
    if kind != "none" and raw.get("factor") is None:
        raise DataError(
            f"{raw.where}: rope_parameters={shown(raw)}, without a factor. Write the one it was trained with."
        )
    scaling: dict[str, Any] = {"rope_scaling": kind}
    for ours, theirs in _KEYS[kind].items():
        if ours == "rope_attention_factor":
            scaling[ours] = _attention_factor(raw, scaling["rope_factor"])
        else:
            usual = longest if ours == "rope_original_tokens" else getattr(RotaryConfig, ours)
            scaling[ours] = raw.number(theirs, usual, minimum=1.0 if ours == "rope_factor" else None)
    nothing = scaling.get("rope_factor") == 1 and scaling.get("rope_attention_factor") is None
    return theta, {"rope_scaling": "none"} if nothing else scaling


def theta_under(raw: Content, key: str, default: float) -> float:
    """Return the RoPE base under a key."""
    return float(raw.number(key, default, maximum=1e12))


def _attention_factor(raw: Content, factor: float) -> float | None:
    """Return yarn's factor: the given one, the ratio of `mscale` and `mscale_all_dim`, or None."""
    if raw.get("attention_factor") is not None:
        return raw.number("attention_factor", 1.0)
    if not (raw.get("mscale") and raw.get("mscale_all_dim")):
        return None
    scale, all_dim = (raw.number(key, 1.0) for key in ("mscale", "mscale_all_dim"))
    return (0.1 * scale * math.log(factor) + 1) / (0.1 * all_dim * math.log(factor) + 1)


def read_layers(
    raw: Content, thetas: Mapping[bool, float], older_of: Collection[bool], longest: int
) -> tuple[tuple[float, float], dict[str, Any]]:
    """Return the bases of global and local layers, and the keys of `RotaryConfig`.

    Args:
        raw: content of a config.json.
        thetas: bases of global (True) and local (False) layers if `rope_parameters` does not state them.
        older_of: the layers that the older `rope_scaling` is of.
        longest: see `read`.

    Raises:
        DataError: see `read`; or local layers are scaled otherwise than global ones.
    """
    parameters, older = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    kinds = parameters.values() if isinstance(parameters, dict) else [parameters]
    if not isinstance(older, dict) or not all(each is None or isinstance(each, dict) for each in kinds):
        raise DataError(
            f"{raw.where}: rope_parameters={shown(parameters)}, rope_scaling={shown(older)}: not an object for each of "
            f"{' and '.join(LAYERS.values())}. Restore the file from a copy."
        )
    if older.get("type", "default") != "default" and "rope_type" not in older:
        raise DataError(
            f"{raw.where}: rope_scaling={shown(older)}: transformers ignores a `type` here. Write rope_type, or remove "
            "it."
        )
    of_kind = {
        key: Content({**(parameters.get(kind) or {}), **(older if key in older_of else {})}, raw.where)
        for key, kind in LAYERS.items()
    }
    theta, scaling = read(of_kind[True], thetas[True], longest)
    local_theta, local = read(of_kind[False], thetas[False], longest)
    if local["rope_scaling"] != "none" and local != scaling:
        raise DataError(
            f"{raw.where}: rope_parameters={shown(parameters)}, rope_scaling={shown(older)}; local layers are scaled "
            "as global ones here, or not at all. Name another model."
        )
    return (theta, local_theta), scaling | {"local_rope_scaled": local["rope_scaling"] != "none"}
