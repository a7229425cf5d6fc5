"""Settings of speed that were left open: which they are, what they are where nobody says, and how they are filled in.

A key is open while it has the value of `OPEN`. What a user gives is never replaced. A run that begins takes what `tune`
found, if that fits (run/tuned.py); one that was trained before keeps what it was trained with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from typing import Any, NamedTuple

from modernbert_train.config.schema import PLAIN_WORKERS, RunConfig


class Open(NamedTuple):
    """The value of a key that says nothing, and the one it then has without any tuning."""

    value: Any
    plain: Any


OPEN: dict[str, Open] = {
    "compute.attention": Open("auto", "auto"),
    "compute.global_attention": Open(None, None),
    "compute.query_block": Open(None, None),
    "compute.logit_chunk": Open(None, None),
    "compute.compile": Open(None, False),
    "compute.threads": Open(None, None),
    "optim.fused": Open(None, False),
    "data.num_workers": Open(None, PLAIN_WORKERS),
}
MICROBATCH = "microbatch_tokens"  # of a phase, the one key that each phase has its own of


def open_settings(config: RunConfig) -> dict[str, Any]:
    """The dotted keys that a run leaves open, each with what it is without tuning."""
    found = {}
    for key, setting in OPEN.items():
        section, name = key.split(".")
        if getattr(getattr(config, section), name, not setting.value) == setting.value:
            found[key] = setting.plain
    if config.compute.attention != "auto":  # then global layers have the same, as its comment says
        found.pop("compute.global_attention", None)
    for name, phase in config.phases.items():
        if phase.microbatch_tokens is None:
            found[f"phases.{name}.{MICROBATCH}"] = phase.row_tokens
    return found


def with_settings(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """The run with these values of dotted keys."""
    for key, value in settings.items():
        config = _replaced(config, key.split("."), value)
    return config


def filled(config: RunConfig, found: Mapping[str, Any]) -> RunConfig:
    """The run with nothing open: each key as it is given, or else as found, or else plain."""
    return with_settings(config, {key: found.get(key, plain) for key, plain in open_settings(config).items()})


def recorded(config: RunConfig, last: RunConfig) -> RunConfig:
    """The run with what it left open as it was when it was trained last; what was open then, too, was plain."""
    then = {key: value_of(last, key) for key in open_settings(config)}
    still_open = open_settings(last)
    return filled(config, {key: value for key, value in then.items() if key not in still_open and value is not ABSENT})


ABSENT = object()


def value_of(config: RunConfig, key: str) -> Any:
    """The value of a dotted key; ABSENT where the run has no such phase, or its optimizer no such key."""
    found: Any = config
    for part in key.split("."):
        found = found.get(part, ABSENT) if isinstance(found, dict) else getattr(found, part, ABSENT)
    return found


def assigned(key: str, value: Any) -> str:
    """KEY=VALUE as it is written on a command line."""
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"


def _replaced(tree: Any, path: list[str], value: Any) -> Any:
    first, *rest = path
    if is_dataclass(tree) and not isinstance(tree, type):
        return replace(tree, **{first: _replaced(getattr(tree, first), rest, value) if rest else value})
    return tree | {first: _replaced(tree[first], rest, value) if rest else value}
