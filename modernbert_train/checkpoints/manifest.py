"""Read and write MANIFEST.json of a checkpoint: its step, why it is kept, the tensor slices, size and hash of each
file, and the manifest's own hash. Also the names of checkpoint folders, `step-00001234`.

Each process writes its tensors into two files: model.safetensors and optimizer.safetensors if one process writes the
whole checkpoint, model-RANK.safetensors and optimizer-RANK.safetensors if several share it.

The manifest is verified before any other file of a checkpoint, so it contains a hash of its content: a reader gets the
content as it was written, or an error.
"""

from __future__ import annotations

import builtins
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from modernbert_train.core.files import os_errors_as
from modernbert_train.core.read_json import Count, as_type, open_file, parse_json
from modernbert_train.errors import StorageError

MANIFEST = "MANIFEST.json"
WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
CONFIG_YAML = "config.yaml"
FILES = (WEIGHTS, OPTIMIZER, STATE, CONFIG_YAML)  # the other files, if one process has written them
SCHEMA = 5  # of the manifest and of all files of a checkpoint
_WITHOUT_SLICES = 4  # the previous schema, with whole tensors in two files; it is still read
MAX_BYTES = 1 << 26  # of the manifest; the entry of a slice takes about a hundred
NAME = re.compile(r"step-(\d{8,})")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}")
Slices = dict[str, dict[str, tuple[Count, Count]]]


@dataclass(frozen=True)
class FileHash:
    """Size of a file, and the hash of its content in hexadecimal."""

    bytes: Count
    xxh3_128: str

    @classmethod
    def of(cls, path: Path) -> FileHash:
        """Hash a file; raises OSError if it cannot be read."""
        digest = xxhash.xxh3_128()
        with path.open("rb") as file:
            while chunk := file.read(1 << 22):
                digest.update(chunk)
        return cls(path.stat().st_size, digest.hexdigest())

    @classmethod
    def of_text(cls, text: str) -> FileHash:
        """Hash a file's text."""
        return cls.of_bytes(text.encode())

    @classmethod
    def of_bytes(cls, content: builtins.bytes) -> FileHash:
        """Hash a file's content."""
        return cls(len(content), xxhash.xxh3_128_hexdigest(content))


@dataclass(frozen=True)
class Manifest:
    """The content of MANIFEST.json, without its hash.

    Attributes:
        step: optimizer steps done.
        phase_end, milestone: reasons to keep it when others are removed.
        files: by name.
        weights, optimizer: the files with these tensors; each maps a tensor that it contains in part to its slice: the
            first row, and the rows of the whole tensor.
        schema: of the checkpoint.
    """

    step: Count
    phase_end: bool
    milestone: bool
    files: dict[str, FileHash]
    weights: Slices
    optimizer: Slices
    schema: Count

    def write(self, folder: Path) -> None:
        """Write the manifest with its hash; raises OSError if the disk refuses it."""
        content = asdict(self)
        text = json.dumps(content | {"xxh3_128": _hash(content)}, indent=1)
        (folder / MANIFEST).write_text(text, encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Read and verify the manifest of a checkpoint, but not its files.

    Args:
        folder: the checkpoint. If it is named by a step, the manifest must have that step.

    Raises:
        StorageError: it is missing, damaged, of another schema, or another checkpoint's.
    """
    path = folder / MANIFEST
    with os_errors_as(StorageError, f"{path}: missing or unreadable"), open_file(path) as file:
        text = file.read(MAX_BYTES)
    with os_errors_as(StorageError, f"{path}: damaged", "", ValueError):
        manifest = _verified(parse_json(text), path)
        if not (manifest.weights and manifest.optimizer):
            raise ValueError("it lists no file of weights, or none of the optimizer")
        for name in (*manifest.weights, *manifest.optimizer, STATE, CONFIG_YAML):
            if name not in manifest.files:
                raise ValueError(f"it does not list {name}")
        for name in manifest.files:
            if not _FILE.fullmatch(name):
                raise ValueError(f"it lists {name[:60]!r}, which is no file of a checkpoint")
    if NAME.fullmatch(folder.name) and step_of(folder) != manifest.step:
        raise StorageError(f"{folder}: its {MANIFEST} is that of step {manifest.step}; it was copied or renamed")
    return manifest


def kept_steps(manifests: Iterable[Manifest], keep: int) -> set[int]:
    """Return the steps of the checkpoints to keep: the newest `keep`, ends of phases and milestones."""
    by_step = {manifest.step: manifest for manifest in manifests}
    for_good = {step for step, manifest in by_step.items() if manifest.phase_end or manifest.milestone}
    return for_good | set(sorted(by_step, reverse=True)[:keep])


def _verified(content: Any, path: Path) -> Manifest:
    if not isinstance(content, dict):
        raise ValueError("not an object")
    hashed = {key: value for key, value in content.items() if key != "xxh3_128"}
    if "xxh3_128" in content and content["xxh3_128"] != _hash(hashed):
        raise ValueError("its content does not match its recorded hash")
    schema = content.get("schema")
    if schema not in (_WITHOUT_SLICES, SCHEMA) and type(schema) is int:
        raise StorageError(
            f"{path.parent}: of schema {schema}, this version reads {_WITHOUT_SLICES} and {SCHEMA}. Continue with the "
            "version that wrote it, or export it there and start from its weights with weights.init_from."
        )
    if "xxh3_128" not in content:
        raise ValueError("it has no hash of itself")
    if schema == _WITHOUT_SLICES:
        hashed = {"weights": {WEIGHTS: {}}, "optimizer": {OPTIMIZER: {}}} | hashed
    manifest: Manifest = as_type(Manifest, hashed)
    return manifest


def _hash(content: dict[str, Any]) -> str:
    """Hash the content in a canonical form of JSON."""
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def step_name(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return int(folder.name.removeprefix("step-"))


def step_folders(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, complete or not, in order of steps."""
    if not folder.is_dir():
        return []
    steps = {path: int(match[1]) for path in folder.iterdir() if (match := NAME.fullmatch(path.name))}
    return sorted(steps, key=steps.__getitem__)


def newest_step(run: Path) -> Path | None:
    """Return the newest checkpoint of a run by its name, complete or not; None without any."""
    return next(reversed(step_folders(run / "checkpoints")), None)
