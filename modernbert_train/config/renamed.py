"""Keys that have another name now: old -> new, so that an old file is answered with what to write; `*` is any name.

docs/config.md shows the table. A line stays as long as files with the old key may be around.
"""

from __future__ import annotations

from collections.abc import Sequence

RENAMED = {
    "device": "compute.device",
    "precision": "compute.precision",
    "model.attention": "compute.attention",
    "model.global_attention": "compute.global_attention",
    "model.compile": "compute.compile",
    "model.activation_checkpointing": "compute.activation_checkpointing",
    "model.z_loss": "objective.z_loss",
    "model.init_from": "weights.init_from",
    "model.grow_from": "weights.grow_from",
    "model.grow_mode": "weights.grow_mode",
    "phases.*.global_rope_theta": "phases.*.model.global_rope_theta",
    "phases.*.local_rope_theta": "phases.*.model.local_rope_theta",
    "phases.*.mask_rate": "phases.*.objective.mask_rate",
    "phases.*.weight_decay": "phases.*.optim.weight_decay",
}


def new_name(path: Sequence[str]) -> str | None:
    """The present name of an old key; None for a key that never was."""
    for old, new in RENAMED.items():
        parts = old.split(".")
        if len(parts) == len(path) and all(part in ("*", word) for part, word in zip(parts, path, strict=True)):
            names = [word for part, word in zip(parts, path, strict=True) if part == "*"]
            return new.replace("*", "{}").format(*names) if names else new
    return None
