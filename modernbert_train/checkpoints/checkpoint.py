"""Checkpoints on disk: whole or invisible, hashed, and opened without running code.

A checkpoint is a folder `step-00001234` with weights and optimizer state in safetensors, everything else in JSON, the
configuration as YAML, and a manifest with the size and hash of each file. It is written under another name, synced,
and renamed when it is complete, so a crash at any moment leaves either the whole checkpoint or none. The newest whole
checkpoint is found by scanning the folders; there is no `latest` link to lose. Whole means that every file matches its
hash and can be read, and that the folder's name, the manifest, the state, the configuration and the tensors agree.

Several processes may write one: `begin` makes the folder, each writes its share of the tensors with `write_part`, and
`finish` renames it. saver.py schedules these calls; this module does not use Composer or ranks.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import Tensor

from modernbert_train.checkpoints.manifest import (
    CONFIG_YAML,
    OPTIMIZER,
    SCHEMA,
    STATE,
    WEIGHTS,
    FileHash,
    Manifest,
    Slices,
    step_folders,
    step_name,
    step_of,
)
from modernbert_train.checkpoints.removal import remove_partial
from modernbert_train.checkpoints.saved_state import SavedState
from modernbert_train.checkpoints.verified import PARTIAL, checked, newest_of, print_choice, verify_files
from modernbert_train.config.schema import RunConfig
from modernbert_train.core.files import os_errors_as, publish, saying
from modernbert_train.core.tensor_files import StoredTensors, read_shapes, write_hashed
from modernbert_train.errors import StorageError
from modernbert_train.models.build import shapes_of

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Checkpoint:
    """A complete, verified checkpoint.

    Attributes:
        folder: its path.
        state: clock, data position and everything else that is not a tensor.
        config: the configuration that it was written with.
        phase_end: it closes a phase and is kept for good.
        weight_files, optimizer_files: names of these files, with the slices in each; see `Manifest`.
    """

    folder: Path
    state: SavedState
    config: RunConfig
    phase_end: bool
    weight_files: Slices = field(default_factory=lambda: {WEIGHTS: {}})
    optimizer_files: Slices = field(default_factory=lambda: {OPTIMIZER: {}})

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.state.step

    @property
    def is_average(self) -> bool:
        """True if it is the mean of others (average.py): weights only, so no training can continue from it."""
        return self.state.training is None

    @property
    def weights_hash(self) -> str:
        """The hash that identifies these weights."""
        hashes = [FileHash.of(self.folder / name).xxh3_128 for name in sorted(self.weight_files)]
        return hashes[0] if len(hashes) == 1 else FileHash.of_text("".join(hashes)).xxh3_128

    def weights(self) -> dict[str, Tensor]:
        """Return every parameter, whole, by name."""
        return self._whole(self.stored_weights())

    def optimizer(self) -> dict[str, Tensor]:
        """Return the optimizer state, whole, as `<key>/<parameter name>`."""
        return self._whole(self.stored_optimizer())

    def stored_weights(self) -> StoredTensors:
        """Return lazy `weights`: tensors are read on access."""
        return self._stored(self.weight_files, floating=True)

    def stored_optimizer(self) -> StoredTensors:
        """Return the lazy `optimizer`."""
        return self._stored(self.optimizer_files, floating=False)

    def _stored(self, files: Slices, *, floating: bool) -> StoredTensors:
        """Open the tensors; raises StorageError if a file was damaged since the checkpoint was opened."""
        with self._reading():
            return StoredTensors(self.folder, files, floating=floating)

    def _whole(self, stored: StoredTensors) -> dict[str, Tensor]:
        with self._reading():
            return dict(stored)

    def _reading(self) -> AbstractContextManager[None]:
        problem, remedy = "damaged since it was opened", "The same command finds the newest checkpoint that is whole."
        return os_errors_as(StorageError, f"{self.folder}: {problem}", remedy, ValueError)


@dataclass(frozen=True)
class Share:
    """The tensors of a checkpoint that one process writes, on the CPU.

    Attributes:
        weights, optimizer: by name, whole or as a slice of rows.
        weight_slices, optimizer_slices: first row of each slice, and rows of the whole tensor.
        suffix: of its files' names; empty if it writes all tensors.
    """

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    weight_slices: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    optimizer_slices: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    suffix: str = ""

    @property
    def bytes(self) -> int:
        """Size of its tensors."""
        return sum(t.numel() * t.element_size() for part in (self.weights, self.optimizer) for t in part.values())


@dataclass(frozen=True)
class Part:
    """A process's part of a checkpoint, for the manifest, and names of tensors that are not finite."""

    files: dict[str, FileHash]
    weights: Slices
    optimizer: Slices
    not_finite: list[str]


def folder_of(checkpoints: Path, step: int) -> Path:
    """Return the path of a step's checkpoint once it is whole."""
    return checkpoints / step_name(step)


@contextmanager
def storage_errors(final: Path) -> Iterator[None]:
    """Turn an OSError of the block into a StorageError of the checkpoint."""
    with os_errors_as(
        StorageError,
        f"{final}: cannot write the checkpoint",
        "Earlier checkpoints are untouched; fix the disk and run the same command again.",
    ):
        yield


def begin(final: Path, needed: int) -> Path:
    """Make the folder for writing a checkpoint; remains of crashed writes are removed first.

    Args:
        final: the checkpoint's own name, see `folder_of`.
        needed: bytes of all its tensors.

    Raises:
        StorageError: the disk is full, or refuses the folder.
    """
    with storage_errors(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        remove_partial(final.parent)
        free = shutil.disk_usage(final.parent).free
        if free < needed:
            raise StorageError(
                f"{final}: the checkpoint needs {needed:,} bytes, {free:,} are free. Free some space, or move the "
                "run's folder to another disk and set runs_folder; older ones are removed only once this one is whole. "
                "Those already there are untouched and the same command resumes from them."
            )
        staging = final.with_name(f"{final.name}{PARTIAL}-{os.getpid()}")
        staging.mkdir()
    return staging


def write_part(staging: Path, share: Share, progress: Callable[[], object] = lambda: None) -> Part:
    """Write one process's share into the folder of a checkpoint; it is on the disk when this returns.

    Args:
        staging: made by `begin`, perhaps by another process.
        share: of this process.
        progress: called after every successful write.

    Raises:
        OSError: the disk refuses it.
    """
    names = [name.replace(".", f"{share.suffix}.", 1) for name in (WEIGHTS, OPTIMIZER)]
    weights, optimizer = (
        write_hashed(staging / name, tensors, progress)
        for name, tensors in zip(names, (share.weights, share.optimizer), strict=True)
    )
    return Part(
        files={
            name: FileHash(written.bytes, written.xxh3_128)
            for name, written in zip(names, (weights, optimizer), strict=True)
        },
        weights={names[0]: dict(share.weight_slices)},
        optimizer={names[1]: dict(share.optimizer_slices)},
        not_finite=weights.not_finite + optimizer.not_finite,
    )


def finish(
    staging: Path,
    final: Path,
    parts: Sequence[Part],
    *,
    state: str,
    config_yaml: str,
    phase_end: bool,
    milestone: bool,
) -> int:
    """Rename a checkpoint to its final name, once it is complete and on the disk.

    Args:
        staging: the folder with all parts.
        final: see `folder_of`.
        parts: of all processes.
        state: text of state.json.
        config_yaml: the run's configuration.
        phase_end, milestone: keep it for good, as the end of a phase or because the configuration asks for it.

    Returns:
        Its bytes.

    Raises:
        OSError: the disk refuses it.
    """
    (staging / STATE).write_text(state, encoding="utf-8")
    (staging / CONFIG_YAML).write_text(config_yaml, encoding="utf-8")
    files = {name: file_hash for part in parts for name, file_hash in part.files.items()}
    files |= {name: FileHash.of(staging / name) for name in (STATE, CONFIG_YAML)}
    weights = {name: slices for part in parts for name, slices in part.weights.items()}
    optimizer = {name: slices for part in parts for name, slices in part.optimizer.items()}
    manifest = Manifest(step_of(final), phase_end, milestone, files, weights, optimizer, SCHEMA)
    manifest.write(staging)
    publish(staging, final)  # an existing folder was damaged, and is moved aside; `clean` removes it
    return sum(file_hash.bytes for file_hash in files.values())


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
    """Write a checkpoint in one go; it becomes visible only once it is complete and on disk.

    Args:
        folder: the run's checkpoint folder.
        weights, optimizer: whole tensors on the CPU.
        state: everything else.
        config_yaml, phase_end, milestone: see `finish`.

    Returns:
        Its folder.

    Raises:
        StorageError: no space, no permission, or another error of the disk; no visible file is left behind.
    """
    final, share = folder_of(folder, state.step), Share(weights, optimizer)
    staging = begin(final, share.bytes)
    try:
        with storage_errors(final):
            part = write_part(staging, share)
            finish(
                *(staging, final, [part]),
                state=state.as_json(),
                config_yaml=config_yaml,
                phase_end=phase_end,
                milestone=milestone,
            )
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return final


def verify(folder: Path) -> Checkpoint:
    """Open a checkpoint and verify it completely.

    Raises:
        StorageError: names the file and the problem.
    """
    verified = verify_files(folder)
    manifest, config = verified.manifest, verified.config
    weights = _shapes(folder, manifest.weights, floating=True)
    moments = _shapes(folder, manifest.optimizer, floating=False)
    weights_file, optimizer_file = (folder / next(iter(files)) for files in (manifest.weights, manifest.optimizer))
    _check_shapes(weights_file, optimizer_file, config, weights, moments)
    return Checkpoint(folder, verified.state, config, manifest.phase_end, manifest.weights, manifest.optimizer)


def _shapes(folder: Path, files: Slices, *, floating: bool) -> Shapes:
    for name in files:
        checked(folder / name, partial(read_shapes, floating=floating))
    return checked(folder, lambda path: StoredTensors(path, files, floating=floating)).shapes


def _check_shapes(
    weights_file: Path, optimizer_file: Path, config: RunConfig, weights: Shapes, moments: Shapes
) -> None:
    expected = shapes_of(config.model, config.objective)
    for name in sorted(expected.keys() | weights.keys()):
        if weights.get(name) != expected.get(name):
            raise StorageError(
                f"{weights_file}: {name} has the shape {weights.get(name)}, {expected.get(name)} by its {CONFIG_YAML}"
            )
    for key, shape in moments.items():
        name = key.partition("/")[2]
        # a number, one for each weight, or one for each row of weights
        if name not in expected or shape not in ((), expected[name], (*expected[name][:1], 1)):
            raise StorageError(
                f"{optimizer_file}: {key} has the shape {shape}, {expected.get(name)} by its {CONFIG_YAML}"
            )


def open_named(folder: Path) -> Checkpoint:
    """Open the checkpoint that a user named; no other one is used instead.

    Raises:
        StorageError: it is missing or damaged; names the other checkpoints of its folder.
    """
    names = [path.name for path in step_folders(folder.parent) if path != folder]
    others = f"one of those in {folder.parent}: {', '.join(names)}" if names else "another"
    instead = f"Name {others}, or the run."
    if not folder.is_dir():
        raise StorageError(f"{folder}: no such checkpoint. {instead}")
    with saying(after=f". Restore it from a copy. {instead}"):
        return verify(folder)


def newest_valid(folder: Path, last_step: int | None = None) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest whole checkpoint, and why each newer one was passed over; see `newest_of`."""
    return newest_of(folder, verify, last_step)


def newest_checkpoint(run: str | Path) -> Checkpoint:
    """Return the newest whole checkpoint of a run, by its folder; warn of damaged ones that are newer.

    Raises:
        StorageError: no checkpoint exists.
    """
    folder = Path(run) / "checkpoints"
    newest, passed_over = newest_valid(folder)
    if newest is None:
        raise StorageError(f"{folder}: no checkpoint yet. Train the run first.")
    print_choice(newest, passed_over)
    return newest
