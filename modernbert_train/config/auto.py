"""Keys that decide how fast a run is and may be left open, and how open keys are filled in.

A key is open while it has the value of `OPEN`; a value that the user gives is never replaced. plan/speed_settings.py
closes the keys of a run that starts; a resumed run keeps its settings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from modernbert_train.config.schema import PLAIN_WORKERS, RunConfig


class Open(NamedTuple):
    """The value that leaves a key open, and the plain value, which works on every device."""

    value: Any
    plain: Any


OPEN: dict[str, Open] = {
    # sdpa on a CPU; on a GPU models/attention/ chooses by capability and the installed FlashAttention
    "compute.attention": Open("auto", "auto"),
    "compute.global_attention": Open(None, None),  # as compute.attention
    # 64; with 32 or 128 the quickstart was 1.02 x as fast, within noise (RESULTS, Tune)
    "compute.query_block": Open(None, None),
    "compute.logit_chunk": Open(None, None),  # as ComputeConfig.logits_at_once: 1 GiB of logits, 64 MiB on a CPU
    # compiled on a CPU, the quickstart was 1.06 x as fast (RESULTS, Tune); a short run loses more by compiling
    "compute.compile": Open(None, False),
    "compute.threads": Open(None, None),  # OMP_NUM_THREADS, by which the launcher divides the cores, else torch's
    "optim.fused": Open(None, False),
    # one packs and masks millions of tokens a second; 0 was 0.99 x (RESULTS, Tune)
    "data.num_workers": Open(None, PLAIN_WORKERS),
}
MICROBATCH = "microbatch_tokens"  # key of a phase; each phase has one


def microbatch_key(phase: str) -> str:
    """Return the dotted key of a phase's microbatch."""
    return f"phases.{phase}.{MICROBATCH}"


def open_settings(config: RunConfig) -> dict[str, Any]:
    """Return the dotted keys that a run leaves open, each with its plain value; a microbatch's is one row."""
    settings = {}
    for key, setting in OPEN.items():
        section, name = key.split(".")
        if getattr(getattr(config, section), name) == setting.value:
            settings[key] = setting.plain
    if config.compute.attention != "auto":  # then global layers use the same kernel
        settings.pop("compute.global_attention", None)
    for name, phase in config.phases.items():
        if phase.microbatch_tokens is None:
            settings[microbatch_key(name)] = phase.row_tokens
    return settings


def with_settings(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """Return the run with these values of dotted keys."""
    for key, value in settings.items():
        config = _replaced(config, key.split("."), value)
    return config


def filled(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """Return the run without open keys: an open key gets its value in `settings`, or the plain one."""
    return with_settings(config, {key: settings.get(key, plain) for key, plain in open_settings(config).items()})


def recorded(config: RunConfig, last: RunConfig) -> RunConfig:
    """Return the run with its open keys as last trained; those that were open then too get their plain values."""
    return filled(config, kept(config, last))


def kept(config: RunConfig, last: RunConfig) -> dict[str, Any]:
    """Return the value that each open key had when the run was last trained.

    The microbatch of a phase that is new or has another row length is left out, to be chosen again.
    """
    plain = open_settings(last)
    settings = {key: plain.get(key, value_of(last, key)) for key in open_settings(config)}
    for name, phase in config.phases.items():
        if name in last.phases and last.phases[name].row_tokens != phase.row_tokens:
            settings.pop(microbatch_key(name), None)
    return {key: value for key, value in settings.items() if value is not ABSENT}


ABSENT = object()


def value_of(config: RunConfig, key: str) -> Any:
    """Return the value of a dotted key; ABSENT if the run lacks the phase, or its optimizer the key."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part, ABSENT) if isinstance(value, dict) else getattr(value, part, ABSENT)
    return value


def assigned(key: str, value: Any) -> str:
    """Return KEY=VALUE as on a command line."""
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"


def _replaced(tree: Any, path: list[str], value: Any) -> Any:
    first, *rest = path
    if isinstance(tree, Mapping):
        return {**tree, first: _replaced(tree[first], rest, value) if rest else value}
    return replace(tree, **{first: _replaced(getattr(tree, first), rest, value) if rest else value})
