"""Checkpoints of a tiny model, for tests of damage; and edits that their hashes cover."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from modernbert_train.checkpoints import manifest
from modernbert_train.checkpoints.checkpoint import commit
from modernbert_train.checkpoints.manifest import MANIFEST, FileHash
from modernbert_train.checkpoints.saved_state import SavedState, SavedTime, TrainingState
from modernbert_train.config.load import load_run, to_yaml
from modernbert_train.config.schema import RunConfig
from modernbert_train.models.modernbert import ModernBertForMaskedLM

CONFIG = load_run(
    [],
    [
        *("name=small", "data.train=absent", "data.tokenizer=absent", "optim.lr=1"),
        "model={vocab_size: 8, hidden_size: 4, num_layers: 1, num_heads: 1, intermediate_size: 4}",
        "phases.short={tokens: 10_000_000_000, row_tokens: 64, batch_rows: 8, microbatch_tokens: 64}",
    ],
)
WEIGHT = "model.layers.0.mlp.Wo.weight"


def write(
    folder: Path,
    step: int,
    *,
    phase_end: bool = False,
    milestone: bool = False,
    config: RunConfig = CONFIG,
    state: SavedState | None = None,
) -> Path:
    """Write a whole checkpoint of `step` steps and, unless the state says otherwise, ten times as many tokens.

    Returns:
        Its folder.
    """
    model = ModernBertForMaskedLM(config.model)
    weights = {name: torch.full_like(parameter, step) for name, parameter in model.named_parameters()}
    moments = {f"exp_avg/{name}": tensor / 2 for name, tensor in weights.items()}
    counts = {f"step/{name}": torch.tensor(step) for name in weights}
    return commit(
        folder,
        weights=weights,
        optimizer=moments | counts,
        state=state_of(step) if state is None else state,
        config_yaml=to_yaml(config),
        phase_end=phase_end,
        milestone=milestone,
    )


def state_of(step: int, *, tokens: int | None = None, phase: str = "short", tokenizer: str = "0" * 64) -> SavedState:
    tokens = 10 * step if tokens is None else tokens
    clock = dict.fromkeys(SavedTime.__annotations__, 0) | {"batch": step, "sample": step, "token": tokens}
    return SavedState(
        step=step,
        tokens=tokens,
        phase=phase,
        data={"tokenizer": tokenizer},
        training=TrainingState(
            seconds=1.5,
            timestamp=SavedTime(**clock),  # type: ignore[typeddict-item]
            loader={
                "tokens": tokens,
                "phase": phase,
                "streams": {
                    "train": {"epoch": 0, "block": 0, "laid_out_for": 62, "taken": 3, "offset": 0, "given": 90}
                },
                "weights": [1],
                "lag": [0],
                "packer": {"row_tokens": 64, "ready": [[(0, 1, 0, 9)]], "waiting": [(2, (0, 2, 0, 7))]},
            },
            stability={
                "phase": phase,
                "losses": [6.5, 6.25],
                "skipped_updates": [{"step": 1, "fault": "non_finite", "action": "skip", "tokens": (0, 10)}],
                "unlabelled_steps": 0,
            },
        ),
        average=[],
    )


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def sign(folder: Path, change: Callable[[dict[str, Any]], Any] = lambda content: None) -> None:
    """Recompute a checkpoint's hashes, as a user would who edits it on purpose.

    Args:
        folder: the checkpoint.
        change: edits the content of its manifest first.
    """
    content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    content["files"] = {
        name: vars(FileHash.of(folder / name))
        for name in sorted(path.name for path in folder.iterdir() if path.name != MANIFEST)
    }
    change(content)
    content.pop("xxh3_128", None)
    (folder / MANIFEST).write_text(json.dumps(content | {"xxh3_128": manifest._hash(content)}), encoding="utf-8")


def edit_state(folder: Path, field: str, value: Any = ...) -> None:
    """Replace or remove a dotted field of state.json, and update the hashes."""
    path = folder / "state.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    place, *names = content, *field.split(".")
    for name in names[:-1]:
        place = place[int(name) if isinstance(place, list) else name]
    if value is ...:
        del place[names[-1]]
    else:
        place[names[-1]] = value
    path.write_text(json.dumps(content), encoding="utf-8")
    sign(folder)


def _header(tensors: dict[str, Any], data: int = 64) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


_LINE = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}
# files that are not tensors, or not a model's
BAD_TENSORS = {
    "a header of 2^63 bytes": struct.pack("<Q", 1 << 63) + b"{}",
    "empty": b"",
    "cut in its length": b"\1\0\0",
    "cut in its header": _header({WEIGHT: _LINE})[:20],
    "cut in its data": _header({WEIGHT: _LINE}, data=63),
    "not JSON": struct.pack("<Q", 8) + b"{{{{{{{{",
    "nested deeply": struct.pack("<Q", 90_000) + b"[" * 90_000,
    "a shape of another size": _header({WEIGHT: _LINE | {"shape": [4, 5]}}),
    "a shape beyond memory": _header({WEIGHT: _LINE | {"shape": [1 << 40, 1 << 40]}}),
    "offsets outside": _header({WEIGHT: _LINE | {"data_offsets": [0, 1 << 40]}}),
    "an unknown type": _header({WEIGHT: _LINE | {"dtype": "F128"}}),
    "no tensors": _header({}, data=0),
    "one tensor of all": _header({WEIGHT: _LINE}),
    "whole numbers": _header({WEIGHT: _LINE | {"dtype": "I32"}}),
    "a tensor that no model has": _header({"x": _LINE}),
}
