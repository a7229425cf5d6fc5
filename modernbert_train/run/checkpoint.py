"""Checkpoints on disk: whole or invisible, hashed, and opened without running code.

A checkpoint is a folder `step-00001234` with weights and optimizer state in safetensors, everything else in JSON, the
configuration as YAML, and a manifest with the size and hash of each file. It is written under another name, synced,
and renamed when it is complete, so a crash at any moment leaves either the whole checkpoint or none. The newest one
that is whole is found by looking at the folders; there is no `latest` link to lose. Whole means that every file has its
hash, that each can be read, and that all of them say the same: the folder's name, the manifest, the state, the
configuration and the tensors.

Composer and ranks are not known here; see gather.py for what goes in.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from modernbert_train.config.load import load_run
from modernbert_train.config.schema import RunConfig
from modernbert_train.errors import ConfigError, StorageError
from modernbert_train.files import publish
from modernbert_train.models.build import shapes_of
from modernbert_train.run.manifest import (
    CONFIG_YAML,
    FILES,
    OPTIMIZER,
    STATE,
    WEIGHTS,
    FileHash,
    Manifest,
    read_manifest,
)
from modernbert_train.run.saved_state import SavedState, read_state
from modernbert_train.tensor_files import read_shapes, read_tensors, write_tensors

Shapes = Mapping[str, tuple[int, ...]]
T = TypeVar("T")
_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = ".partial"


@dataclass(frozen=True)
class Checkpoint:
    """A complete, verified checkpoint.

    Attributes:
        folder: where it is.
        state: clock, data position and everything else that is not a tensor.
        config: the configuration that it was written with.
        phase_end: it closes a phase and is kept for good.
    """

    folder: Path
    state: SavedState
    config: RunConfig
    phase_end: bool

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.state.step

    @property
    def is_average(self) -> bool:
        """Whether it is the mean of others (average.py): weights alone, so that no training goes on from it."""
        return self.state.training is None

    @property
    def weights_hash(self) -> str:
        """By which these very weights are known again."""
        return FileHash.of(self.folder / WEIGHTS).xxh3_128

    def weights(self) -> dict[str, Tensor]:
        """Every parameter, whole, by name."""
        return _load(self.folder / WEIGHTS, floating=True)

    def optimizer(self) -> dict[str, Tensor]:
        """Optimizer state, whole, as `<key>/<parameter name>`."""
        return _load(self.folder / OPTIMIZER, floating=False)


def _load(path: Path, *, floating: bool) -> dict[str, Tensor]:
    """Raises StorageError if the file was damaged since the checkpoint was opened."""
    try:
        return read_tensors(path, floating=floating)
    except (OSError, ValueError) as error:
        raise StorageError(
            f"{path}: damaged since it was opened; {error}. The same command finds the newest checkpoint that is whole."
        ) from None


def commit(
    folder: Path,
    *,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: SavedState,
    config_yaml: str,
    phase_end: bool,
    milestone: bool = False,
) -> Path:
    """Write a checkpoint; it becomes visible only once it is complete and on disk.

    Args:
        folder: the run's checkpoint folder.
        weights, optimizer: whole tensors on the CPU.
        state: everything else.
        config_yaml: the run's configuration.
        phase_end, milestone: keep it for good, as the end of a phase or because checkpoint.interval_tokens asks for it.

    Returns:
        Its folder.

    Raises:
        StorageError: no space, no permission, or any other refusal of the disk; nothing visible is left behind.
    """
    final = folder / f"step-{state.step:08d}"
    staging = folder / f"{final.name}{_PARTIAL}-{os.getpid()}"
    needed = sum(t.numel() * t.element_size() for part in (weights, optimizer) for t in part.values())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise StorageError(
                f"{final}: the checkpoint needs {needed:,} bytes, {free:,} are free. Free some space or lower "
                "checkpoint.keep; the checkpoints already there are untouched and the same command goes on from them."
            )
        staging.mkdir()
        write_tensors(staging / WEIGHTS, weights)
        write_tensors(staging / OPTIMIZER, optimizer)
        state.write(staging / STATE)
        (staging / CONFIG_YAML).write_text(config_yaml, encoding="utf-8")
        files = {name: FileHash.of(staging / name) for name in FILES}
        Manifest(state.step, phase_end, milestone, files).write(staging)
        publish(staging, final)  # what is there was damaged, and passed over by resuming; prune removes it
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise StorageError(
            f"{final}: cannot write the checkpoint ({error.strerror or error}). Earlier checkpoints are untouched; "
            "fix the disk and run the same command again."
        ) from error
    return final


def verify(folder: Path) -> Checkpoint:
    """Open a checkpoint, if it is whole.

    Raises:
        StorageError: names the file and what is wrong with it.
    """
    manifest = read_manifest(folder)
    for name in FILES:
        expected = manifest.files[name]
        try:
            found = FileHash.of(folder / name)
        except OSError as error:
            raise StorageError(f"{folder / name}: cannot be read ({error.strerror})") from None
        if found != expected:
            raise StorageError(f"{folder / name}: damaged; found {found}, the manifest says {expected}")
    config = _checked(folder / CONFIG_YAML, lambda path: load_run([path]))
    state = _checked(folder / STATE, lambda path: read_state(path, config, manifest.step))
    weights = _checked(folder / WEIGHTS, read_shapes)
    moments = _checked(folder / OPTIMIZER, partial(read_shapes, floating=False))
    _check_shapes(folder, config, weights, moments)
    return Checkpoint(folder, state, config, manifest.phase_end)


def _checked(path: Path, read: Callable[[Path], T]) -> T:
    """What a file of a checkpoint holds; its hash is right, and its content may still be wrong."""
    try:
        return read(path)
    except (OSError, ValueError, ConfigError) as error:
        raise StorageError(f"{path}: damaged, though its hash is right; {error}") from None


def _check_shapes(folder: Path, config: RunConfig, weights: Shapes, moments: Shapes) -> None:
    expected = shapes_of(config.model, config.objective)
    for name in sorted(expected.keys() | weights.keys()):
        if weights.get(name) != expected.get(name):
            raise StorageError(
                f"{folder / WEIGHTS}: {name} has the shape {weights.get(name)}, {expected.get(name)} by its "
                f"{CONFIG_YAML}"
            )
    for key, shape in moments.items():
        name = key.partition("/")[2]
        # a number, one for each weight, or one for each row of them
        if name not in expected or shape not in ((), expected[name], (*expected[name][:1], 1)):
            raise StorageError(
                f"{folder / OPTIMIZER}: {key} has the shape {shape}, {expected.get(name)} by its {CONFIG_YAML}"
            )


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
    """Find the newest checkpoint that is whole.

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


def step_folders(folder: Path) -> list[Path]:
    """Folders of checkpoints, whole or not, in order of steps."""
    found = {path: int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}
    return sorted(found, key=found.__getitem__)


def newest_checkpoint(config: RunConfig) -> Checkpoint:
    """The newest whole checkpoint of a run; warns of damaged ones that are newer.

    Raises:
        StorageError: there is none.
    """
    folder = Path(config.folder) / "checkpoints"
    found, passed_over = newest_valid(folder)
    for text in passed_over:
        print(f"warning: passed over a damaged checkpoint: {text}")
    if found is None:
        raise StorageError(f"{folder}: no checkpoint yet. Train the run first.")
    return found


def clean(folder: Path, keep: int) -> None:
    """Remove what crashed writes left, and all but the newest `keep` checkpoints, ends of phases and milestones.

    Only folders that this module made are touched: partial ones, and those whose manifest holds. What has a damaged
    one is left for a person to look at.
    """
    if not folder.is_dir():
        return
    found: list[tuple[Manifest, Path]] = []
    for path in folder.iterdir():
        if _NAME.match(path.name) and _PARTIAL in path.name:
            shutil.rmtree(path, ignore_errors=True)
        elif _NAME.fullmatch(path.name):
            with suppress(StorageError):
                found.append((read_manifest(path), path))
    for manifest, path in sorted(found, key=lambda each: each[0].step, reverse=True)[keep:]:
        if not (manifest.phase_end or manifest.milestone):
            shutil.rmtree(path, ignore_errors=True)
