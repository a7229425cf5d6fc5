"""MANIFEST.json of a checkpoint: which step it is, what it is kept for, which slices of the tensors lie in which file,
the size and hash of each file, and its own.

A process writes its tensors into two files of its own: model.safetensors and optimizer.safetensors where one process
writes the whole checkpoint, model-RANK.safetensors and optimizer-RANK.safetensors where several share it.

Nothing else in a checkpoint is believed before the manifest is, so it is protected as the files are: by a hash of all
that stands in it. Whoever reads one gets what was written, or an error.
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
FILES = (WEIGHTS, OPTIMIZER, STATE, CONFIG_YAML)  # beside it, where one process has written them
SCHEMA = 5  # of the manifest and of all files of a checkpoint
_WITHOUT_SLICES = 4  # the schema before, of a checkpoint in two files of whole tensors; it is still read
MOST_BYTES = 1 << 26  # of the manifest; a slice takes about a hundred
_STEP = re.compile(r"step-(\d+)")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}")
Slices = dict[str, dict[str, tuple[Count, Count]]]


@dataclass(frozen=True)
class FileHash:
    """What is known of a file.

    Attributes:
        bytes: its size.
        xxh3_128: hash of its content, in hexadecimal.
    """

    bytes: Count
    xxh3_128: str

    @classmethod
    def of(cls, path: Path) -> FileHash:
        """Raises OSError if the file cannot be read."""
        digest = xxhash.xxh3_128()
        with path.open("rb") as file:
            while chunk := file.read(1 << 22):
                digest.update(chunk)
        return cls(path.stat().st_size, digest.hexdigest())

    @classmethod
    def of_text(cls, text: str) -> FileHash:
        """As of a file with this text."""
        return cls.of_bytes(text.encode())

    @classmethod
    def of_bytes(cls, content: builtins.bytes) -> FileHash:
        """As of a file with this content."""
        return cls(len(content), xxhash.xxh3_128_hexdigest(content))


@dataclass(frozen=True)
class Manifest:
    """What stands in MANIFEST.json, but for the hash of it.

    Attributes:
        step: optimizer steps done.
        phase_end, milestone: what it is kept for, when others are removed.
        files: by name.
        weights, optimizer: the files that hold them, each with the slice of every tensor that is not whole in it: its
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
        """Raises OSError if the disk refuses it."""
        content = asdict(self)
        text = json.dumps(content | {"xxh3_128": _hash(content)}, indent=1)
        (folder / MANIFEST).write_text(text, encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint and make sure of it; the files are not looked at.

    Args:
        folder: the checkpoint. If its name tells a step, that is the manifest's.

    Raises:
        StorageError: it is missing, damaged, of another schema, or another checkpoint's.
    """
    path = folder / MANIFEST
    with os_errors_as(StorageError, f"{path}: missing or unreadable"), open_file(path) as file:
        text = file.read(MOST_BYTES)
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
    named = _STEP.fullmatch(folder.name)
    if named is not None and int(named[1]) != manifest.step:
        raise StorageError(f"{folder}: its {MANIFEST} is that of step {manifest.step}; it was copied or renamed")
    return manifest


def kept_steps(manifests: Iterable[Manifest], keep: int) -> set[int]:
    """Of some checkpoints those that stay: the newest `keep`, ends of phases and milestones."""
    found = {manifest.step: manifest for manifest in manifests}
    for_good = {step for step, manifest in found.items() if manifest.phase_end or manifest.milestone}
    return for_good | set(sorted(found, reverse=True)[:keep])


def _verified(content: Any, path: Path) -> Manifest:
    if not isinstance(content, dict):
        raise ValueError("not an object")
    rest = {key: value for key, value in content.items() if key != "xxh3_128"}
    if "xxh3_128" in content and content["xxh3_128"] != _hash(rest):
        raise ValueError("its content does not have the hash that is in it")
    schema = content.get("schema")
    if schema not in (_WITHOUT_SLICES, SCHEMA) and type(schema) is int:
        raise StorageError(
            f"{path.parent}: of schema {schema}, this version reads {_WITHOUT_SLICES} and {SCHEMA}. Continue with the "
            "version that wrote it, or export it there and start from its weights with weights.init_from."
        )
    if "xxh3_128" not in content:
        raise ValueError("it has no hash of itself")
    if schema == _WITHOUT_SLICES:
        rest = {"weights": {WEIGHTS: {}}, "optimizer": {OPTIMIZER: {}}} | rest
    manifest: Manifest = as_type(Manifest, rest)
    return manifest


def _hash(content: dict[str, Any]) -> str:
    """Of the content in the one way in which JSON writes it without a choice."""
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def newest_step(run: Path) -> Path | None:
    """The newest checkpoint of a run by its name alone, whole or not; None where there is none."""
    found = [path for path in (run / "checkpoints").glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return max(found, key=lambda path: int(path.name.removeprefix("step-")), default=None)
