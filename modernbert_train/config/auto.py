"""Settings of speed that were left open: which they are, what they are where nobody says, and how they are filled in.

A key is open while it has the value of `OPEN`. What a user gives is never replaced. A run that begins takes what `tune`
found, if that fits (plan/tuned.py), and otherwise what its device is fast with (plan/room.py says how large a
microbatch is); one that was trained before keeps what it was trained with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from modernbert_train.config.schema import PLAIN_WORKERS, RunConfig


class Open(NamedTuple):
    """The value of a key that says nothing, and the one it then has without any tuning: anywhere, and on fast GPUs."""

    value: Any
    plain: Any
    fast: Any


OPEN: dict[str, Open] = {
    "compute.attention": Open("auto", "auto", "auto"),
    "compute.global_attention": Open(None, None, None),
    "compute.query_block": Open(None, None, None),
    "compute.logit_chunk": Open(None, None, None),
    "compute.compile": Open(None, False, True),
    "compute.threads": Open(None, None, None),
    "optim.fused": Open(None, False, True),
    "data.num_workers": Open(None, PLAIN_WORKERS, PLAIN_WORKERS),
}
MICROBATCH = "microbatch_tokens"  # of a phase, the one key that each phase has its own of


def microbatch_key(phase: str) -> str:
    """The dotted key of a phase's microbatch."""
    return f"phases.{phase}.{MICROBATCH}"


def open_settings(config: RunConfig, *, fast: bool = False) -> dict[str, Any]:
    """The dotted keys that a run leaves open, each with what it is without tuning; a microbatch is one row.

    Args:
        config: the run.
        fast: on a GPU that compiles layers and has fused kernels.
    """
    found = {}
    for key, setting in OPEN.items():
        section, name = key.split(".")
        if getattr(getattr(config, section), name) == setting.value:
            found[key] = setting.fast if fast else setting.plain
    if config.compute.attention != "auto":  # then global layers have the same, as its comment says
        found.pop("compute.global_attention", None)
    for name, phase in config.phases.items():
        if phase.microbatch_tokens is None:
            found[microbatch_key(name)] = phase.row_tokens
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
    return filled(config, kept(config, last))


def kept(config: RunConfig, last: RunConfig) -> dict[str, Any]:
    """What a run leaves open, as it was when it was trained last; without phases that were not there, or of other rows,
    whose microbatch is yet to be chosen."""
    plain = open_settings(last)
    found = {key: plain.get(key, value_of(last, key)) for key in open_settings(config)}
    for name, phase in config.phases.items():
        if name in last.phases and last.phases[name].row_tokens != phase.row_tokens:
            found.pop(microbatch_key(name), None)
    return {key: value for key, value in found.items() if value is not ABSENT}


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
    if isinstance(tree, Mapping):
        return {**tree, first: _replaced(tree[first], rest, value) if rest else value}
    return replace(tree, **{first: _replaced(getattr(tree, first), rest, value) if rest else value})
