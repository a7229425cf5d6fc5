"""Verify a checkpoint without torch: every file matches its hash, and configuration and state are valid and belong to
the step in the folder's name. checkpoint.py also verifies the tensors' names and shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from modernbert_train.checkpoints.manifest import (
    CONFIG_YAML,
    NAME,
    STATE,
    FileHash,
    Manifest,
    read_manifest,
    step_folders,
    step_of,
)
from modernbert_train.checkpoints.saved_state import SavedState, read_state
from modernbert_train.config.load import load_run
from modernbert_train.config.read_yaml import INCLUDE
from modernbert_train.config.schema import RunConfig
from modernbert_train.core.claim import START_OVER
from modernbert_train.core.files import errors_to, os_errors_as
from modernbert_train.core.own_files import require_own_files
from modernbert_train.core.read_json import content_of
from modernbert_train.errors import ConfigError, PluginError, StorageError

T = TypeVar("T")
METRICS = "metrics.jsonl"  # of the run
SUPERSEDED = "superseded"  # a folder for each use of `checkpoints restore`, with the checkpoints it set aside
PARTIAL = ".partial"  # in the name of a folder that is being written, fetched or removed
_HASHING_THREADS = 4
_configs: dict[FileHash, RunConfig] = {}  # by the hash of their text


@dataclass(frozen=True)
class Verified:
    """A checkpoint whose files match their hashes.

    Attributes:
        folder: its path.
        manifest: its manifest.
        state: clock, data position and everything else that is not a tensor.
        config: the configuration that it was written with.
    """

    folder: Path
    manifest: Manifest
    state: SavedState
    config: RunConfig

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.manifest.step


class Opened(Protocol):
    """A checkpoint that was opened, with or without its tensors."""

    @property
    def folder(self) -> Path: ...
    @property
    def state(self) -> SavedState: ...


def require_files(folder: Path) -> Manifest:
    """Read the manifest of a folder, which must contain plain files only.

    Raises:
        StorageError: names the problem.
    """
    require_own_files(folder, StorageError)  # reading a pipe or a device might never end
    return read_manifest(folder)


def check_hashes(folder: Path, manifest: Manifest, names: Iterable[str] | None = None) -> None:
    """Compare the files of a checkpoint, or some of them, with the manifest.

    Raises:
        StorageError: names the file and its actual hash.
    """

    def check(name: str) -> None:
        expected = manifest.files[name]
        with os_errors_as(StorageError, f"{folder / name}: cannot be read"):
            file_hash = FileHash.of(folder / name)
        if file_hash != expected:
            raise StorageError(f"{folder / name}: damaged; found {file_hash}, the manifest says {expected}")

    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        list(threads.map(check, manifest.files if names is None else names))


def checked(path: Path, read: Callable[[Path], T]) -> T:
    """Read a file whose hash is right, but whose content may still be wrong.

    Raises:
        StorageError: the content is wrong.
        PluginError: it needs a plugin that is not installed.
    """
    try:
        return read(path)
    except PluginError:  # the checkpoint may be as good as it was
        raise
    except (OSError, ValueError, ConfigError) as error:
        raise StorageError(f"{path}: damaged, though its hash is right; {error}") from None


def verify_files(folder: Path) -> Verified:
    """Verify a checkpoint without reading its tensors' headers.

    Raises:
        StorageError: names the file and the problem.
    """
    manifest = require_files(folder)
    check_hashes(folder, manifest)
    return read_texts(folder, manifest)


def read_texts(folder: Path, manifest: Manifest) -> Verified:
    """Read configuration and state of a checkpoint whose hashes are right.

    Raises:
        StorageError: one of them is invalid.
    """
    config = checked(folder / CONFIG_YAML, lambda path: _config(path, manifest.files[CONFIG_YAML]))
    state = checked(folder / STATE, lambda path: read_state(path, config, manifest.step))
    return Verified(folder, manifest, state, config)


def _config(path: Path, content: FileHash) -> RunConfig:
    """Read a configuration, cached: most checkpoints of a run have the same, and reading one takes 50 ms."""
    if (cached := _configs.get(content)) is not None:
        return cached
    config = load_run([path])
    if INCLUDE.encode() not in content_of(path):  # an include is relative to the folder, so do not cache it
        _configs[content] = config
    return config


def partial_folders(folder: Path) -> list[Path]:
    """Return the folders of writes that were interrupted, or are in progress."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if NAME.match(path.name) and PARTIAL in path.name)


def newest_of(folder: Path, opened: Callable[[Path], T], last_step: int | None = None) -> tuple[T | None, list[str]]:
    """Find the newest checkpoint that is whole.

    Args:
        folder: the run's checkpoint folder.
        opened: opens one, or raises StorageError.
        last_step: ignore later steps.

    Returns:
        The checkpoint, or None if the folder is empty; and why each newer one was passed over.

    Raises:
        StorageError: there are checkpoints but not one is whole; starting from zero would hide that.
    """
    passed_over: list[str] = []
    for path in reversed(step_folders(folder)):
        if last_step is not None and step_of(path) > last_step:
            continue
        with errors_to(passed_over.append, StorageError):
            return opened(path), passed_over
    if passed_over:
        raise StorageError(
            f"{folder}: no checkpoint is whole.\n  "
            + "\n  ".join(passed_over)
            + f"\nRestore one from a copy, or {START_OVER}."
        )
    return None, []


def print_choice(opened: Opened, passed_over: Sequence[str]) -> None:
    """Print which checkpoint of a run is used, and why, if it is not the newest."""
    for text in passed_over:
        print(f"warning: passed over a damaged checkpoint: {text}")
    if passed_over:
        print(f"taken instead: {opened.folder.name}, {opened.state.tokens:,} tokens, the newest that is whole")
