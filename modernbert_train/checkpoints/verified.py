"""A checkpoint as far as it can be made sure of without torch: every file has its hash, configuration and state make
sense, and both are those of the step that the folder's name says. What is left to checkpoint.py are the tensors' names
and shapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from modernbert_train.checkpoints.manifest import CONFIG_YAML, STATE, FileHash, Manifest, read_manifest
from modernbert_train.checkpoints.saved_state import SavedState, read_state
from modernbert_train.config.load import load_run
from modernbert_train.config.read import INCLUDE
from modernbert_train.config.schema import RunConfig
from modernbert_train.core.files import errors_to, os_errors_as
from modernbert_train.core.own_files import require_own_files
from modernbert_train.core.read_json import content_of
from modernbert_train.errors import ConfigError, PluginError, StorageError

T = TypeVar("T")
NAME = re.compile(r"step-(\d{8,})")
METRICS = "metrics.jsonl"  # of the run
SUPERSEDED = "superseded"  # holds what `checkpoints restore` has set aside, a folder for each time
PARTIAL = ".partial"  # in the name of a folder that is being written, brought back or removed
_HASHING_THREADS = 4
_configs: dict[FileHash, RunConfig] = {}  # by the hash of their text


@dataclass(frozen=True)
class Verified:
    """A checkpoint whose files are what was written.

    Attributes:
        folder: where it is.
        manifest: of it.
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
    """A checkpoint that was opened, in whichever depth."""

    @property
    def folder(self) -> Path: ...
    @property
    def state(self) -> SavedState: ...


def require_files(folder: Path) -> Manifest:
    """The manifest of a folder that holds files of its own and nothing else.

    Raises:
        StorageError: names what is wrong with it.
    """
    require_own_files(folder, StorageError)  # a pipe would be waited for, and a device read without end
    return read_manifest(folder)


def check_hashes(folder: Path, manifest: Manifest, names: Iterable[str] | None = None) -> None:
    """Read the files of a checkpoint, or some of them, and compare what they hold with the manifest.

    Raises:
        StorageError: names the file and what was found.
    """

    def check(name: str) -> None:
        expected = manifest.files[name]
        with os_errors_as(StorageError, f"{folder / name}: cannot be read"):
            found = FileHash.of(folder / name)
        if found != expected:
            raise StorageError(f"{folder / name}: damaged; found {found}, the manifest says {expected}")

    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        list(threads.map(check, manifest.files if names is None else names))


def checked(path: Path, read: Callable[[Path], T]) -> T:
    """What a file of a checkpoint holds; its hash is right, and its content may still be wrong.

    Raises:
        StorageError: it is.
        PluginError: it needs a plugin that is not here.
    """
    try:
        return read(path)
    except PluginError:  # the checkpoint may be as good as it was
        raise
    except (OSError, ValueError, ConfigError) as error:
        raise StorageError(f"{path}: damaged, though its hash is right; {error}") from None


def verify_files(folder: Path) -> Verified:
    """Make sure of a checkpoint without looking into its tensors.

    Raises:
        StorageError: names the file and what is wrong with it.
    """
    manifest = require_files(folder)
    check_hashes(folder, manifest)
    return read_texts(folder, manifest)


def read_texts(folder: Path, manifest: Manifest) -> Verified:
    """Configuration and state of a checkpoint whose hashes are right.

    Raises:
        StorageError: one of them makes no sense.
    """
    config = checked(folder / CONFIG_YAML, lambda path: _config(path, manifest.files[CONFIG_YAML]))
    state = checked(folder / STATE, lambda path: read_state(path, config, manifest.step))
    return Verified(folder, manifest, state, config)


def _config(path: Path, content: FileHash) -> RunConfig:
    """A configuration; most checkpoints of a run have the same, and reading one takes a twentieth of a second."""
    if (known := _configs.get(content)) is not None:
        return known
    found = load_run([path])
    if INCLUDE.encode() not in content_of(path):  # else its place matters
        _configs[content] = found
    return found


def step_folders(folder: Path) -> list[Path]:
    """Folders of checkpoints, whole or not, in order of steps."""
    if not folder.is_dir():
        return []
    found = {path: int(match[1]) for path in folder.iterdir() if (match := NAME.fullmatch(path.name))}
    return sorted(found, key=found.__getitem__)


def partial_folders(folder: Path) -> list[Path]:
    """What writes have left that broke off, or are writing now."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if NAME.match(path.name) and PARTIAL in path.name)


def step_of(folder: Path) -> int:
    """The step that the name of a checkpoint says."""
    return int(folder.name.removeprefix("step-"))


def newest_of(folder: Path, opened: Callable[[Path], T], last_step: int | None = None) -> tuple[T | None, list[str]]:
    """Find the newest checkpoint that is whole.

    Args:
        folder: the run's checkpoint folder.
        opened: opens one, or raises StorageError.
        last_step: leave out those of later steps.

    Returns:
        The checkpoint, or None if there is none at all; and why each newer one was passed over.

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
            + "\nRestore one from a copy, or train from the start with --fresh."
        )
    return None, []


def tell_choice(found: Opened, passed_over: Sequence[str]) -> None:
    """Say which checkpoint was taken for a run, and why, where it is not its newest."""
    for text in passed_over:
        print(f"warning: passed over a damaged checkpoint: {text}")
    if passed_over:
        print(f"taken instead: {found.folder.name}, {found.state.tokens:,} tokens, the newest that is whole")
