"""Checkpoints on disk: whole or invisible, hashed, and opened without running code.

A checkpoint is a folder `step-00001234` with weights and optimizer state in safetensors, everything else in JSON, the
configuration as YAML, and a manifest with the size and hash of each file. It is written under another name, synced,
and renamed when it is complete, so a crash at any moment leaves either the whole checkpoint or none. The newest one
whose hashes hold is found by looking at the folders; there is no `latest` link to lose.

Torch, Composer and ranks are not known here; see state.py for what goes in.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from torch import Tensor

from modernbert_train.errors import StorageError

MANIFEST = "MANIFEST.json"
WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
CONFIG = "config.yaml"
SCHEMA = 2  # of state.json
_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = ".partial"


@dataclass(frozen=True)
class Checkpoint:
    """A complete, verified checkpoint.

    Attributes:
        folder: where it is.
        step: optimizer steps done.
        phase_end: it closes a phase and is kept for good.
    """

    folder: Path
    step: int
    phase_end: bool

    def state(self) -> dict[str, Any]:
        """Clock, data position and everything else that is not a tensor."""
        state: dict[str, Any] = json.loads((self.folder / STATE).read_text(encoding="utf-8"))
        if state.get("schema") != SCHEMA:
            raise StorageError(
                f"{self.folder}: of schema {state.get('schema')}, this version reads {SCHEMA}. Go on with the version "
                "that wrote it, or export it there and start from its weights with model.init_from."
            )
        return state

    @property
    def is_average(self) -> bool:
        """Whether it is the mean of others (average.py): weights alone, so that no training goes on from it."""
        return "average" in self.state()

    def weights(self) -> dict[str, Tensor]:
        """Every parameter, whole, by name."""
        return _load(self.folder / WEIGHTS)

    def optimizer(self) -> dict[str, Tensor]:
        """Optimizer state, whole, as `<key>/<parameter name>`."""
        return _load(self.folder / OPTIMIZER)


def _load(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def commit(
    folder: Path,
    step: int,
    *,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: Mapping[str, Any],
    config_yaml: str,
    phase_end: bool,
    milestone: bool = False,
) -> Checkpoint:
    """Write a checkpoint; it becomes visible only once it is complete and on disk.

    Args:
        folder: the run's checkpoint folder.
        step: optimizer steps done.
        weights, optimizer: whole tensors on the CPU.
        state: JSON.
        config_yaml: the run's configuration.
        phase_end, milestone: keep it for good, as the end of a phase or because checkpoint.interval_tokens asks for it.

    Raises:
        StorageError: no space, no permission, or any other refusal of the disk; nothing visible is left behind.
    """
    final = folder / f"step-{step:08d}"
    partial = folder / f"{final.name}{_PARTIAL}-{os.getpid()}"
    needed = sum(t.numel() * t.element_size() for part in (weights, optimizer) for t in part.values())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise StorageError(
                f"{final}: the checkpoint needs {needed:,} bytes, {free:,} are free. Free some space or lower "
                "checkpoint.keep; the checkpoints already there are untouched and the same command goes on from them."
            )
        partial.mkdir()
        _write_files(partial, weights, optimizer, {"schema": SCHEMA, **state}, config_yaml)
        files = {path.name: _fingerprint(path) for path in sorted(partial.iterdir())}
        manifest = {"schema": 1, "step": step, "phase_end": phase_end, "milestone": milestone, "files": files}
        _write_text(partial / MANIFEST, json.dumps(manifest, indent=1))
        _sync(partial)
        if final.exists():  # a damaged one that resuming passed over
            final.rename(folder / f"{final.name}{_PARTIAL}-replaced-{os.getpid()}")
        partial.rename(final)
        _sync(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise StorageError(
            f"{final}: cannot write the checkpoint ({error.strerror or error}). Earlier checkpoints are untouched; "
            "mend the disk and run the same command again."
        ) from error
    return Checkpoint(final, step, phase_end)


def _write_files(
    partial: Path,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: Mapping[str, Any],
    config_yaml: str,
) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(weights), partial / WEIGHTS)
        save_file(dict(optimizer), partial / OPTIMIZER)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    _write_text(partial / STATE, json.dumps(state))
    _write_text(partial / CONFIG, config_yaml)


def verify(folder: Path) -> Checkpoint:
    """Check every file against the manifest.

    Raises:
        StorageError: names the file and what is wrong with it.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files, step, phase_end = dict(manifest["files"]), int(manifest["step"]), bool(manifest["phase_end"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{folder / MANIFEST}: missing or damaged ({type(error).__name__})") from None
    for name in (WEIGHTS, OPTIMIZER, STATE, CONFIG):
        if name not in files:
            raise StorageError(f"{folder / MANIFEST}: does not list {name}")
    for name, expected in files.items():
        try:
            found = _fingerprint(folder / Path(name).name)
        except OSError as error:
            raise StorageError(f"{folder / name}: cannot be read ({error.strerror})") from None
        if found != expected:
            raise StorageError(f"{folder / name}: damaged; found {found}, the manifest says {expected}")
    return Checkpoint(folder, step, phase_end)


def open_named(folder: Path) -> Checkpoint:
    """The checkpoint in a folder that a user named; it is never replaced by another.

    Raises:
        StorageError: it is not there or is damaged; names the others beside it.
    """
    beside = [path.name for path in folder.parent.glob("step-*") if _NAME.fullmatch(path.name) and path != folder]
    others = f"one of those in {folder.parent}: {', '.join(sorted(beside))}" if beside else "another"
    instead = f"Name {others}, or the run."
    if not folder.is_dir():
        raise StorageError(f"{folder}: no such checkpoint. {instead}")
    try:
        return verify(folder)
    except StorageError as error:
        raise StorageError(f"{error}. Restore it from a copy. {instead}") from None


def newest_valid(folder: Path, last_step: int | None = None) -> tuple[Checkpoint | None, list[str]]:
    """Find the newest checkpoint whose hashes hold.

    Args:
        folder: the run's checkpoint folder.
        last_step: leave out those of later steps.

    Returns:
        The checkpoint, or None if there is none at all; and why each newer one was passed over.

    Raises:
        StorageError: there are checkpoints but not one is whole; starting from zero would hide that.
    """
    if not folder.is_dir():
        return None, []
    steps = {path: int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}
    found = [path for path, step in steps.items() if last_step is None or step <= last_step]
    passed_over: list[str] = []
    for path in sorted(found, key=steps.__getitem__, reverse=True):
        try:
            return verify(path), passed_over
        except StorageError as error:
            passed_over.append(str(error))
    if passed_over:
        raise StorageError(
            f"{folder}: no checkpoint is whole.\n  "
            + "\n  ".join(passed_over)
            + "\nRestore one from a copy, or train from the start with --fresh."
        )
    return None, []


def clean(folder: Path, keep: int) -> None:
    """Remove what crashed writes left, and all but the newest `keep` checkpoints, ends of phases and milestones.

    Only folders that this module made are touched: partial ones, and whole ones with our manifest.
    """
    if not folder.is_dir():
        return
    whole: list[tuple[int, Path]] = []
    for path in folder.iterdir():
        if _NAME.match(path.name) and _PARTIAL in path.name:
            shutil.rmtree(path, ignore_errors=True)
        elif _NAME.fullmatch(path.name) and (path / MANIFEST).is_file():
            whole.append((int(path.name.removeprefix("step-")), path))
    for _, path in sorted(whole, reverse=True)[keep:]:
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # damaged: left for a person to look at
        if not (manifest.get("phase_end") or manifest.get("milestone")):
            shutil.rmtree(path, ignore_errors=True)


def _fingerprint(path: Path) -> dict[str, Any]:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return {"bytes": path.stat().st_size, "xxh3_128": digest.hexdigest()}


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _sync(folder: Path) -> None:
    """Flush a folder and its files to the disk itself."""
    for path in [*folder.iterdir(), folder]:
        if path.is_dir() and path != folder:
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
