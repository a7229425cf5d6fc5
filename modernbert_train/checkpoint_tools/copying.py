"""Copies of checkpoints in a folder or a store, by the same code that fills a run's second home: each file is hashed
while it is read, read back from where it went, and hashed again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from modernbert_train.config.schema import RunConfig
from modernbert_train.copies.copier import Copier, Order, manifest_of
from modernbert_train.copies.store import Store, problem_of
from modernbert_train.errors import ConfigError, StorageError
from modernbert_train.own_files import require_own_files
from modernbert_train.run.manifest import Manifest
from modernbert_train.run.verified import require_files, step_of

_KEY = "--to"


def url_of(to: str) -> str:
    """A folder or a URL as a URL.

    Raises:
        ConfigError: no store is there, or it cannot be used here.
    """
    url = to if "://" in to else f"file://{Path(to).absolute()}"
    if (problem := problem_of(url, _KEY)) is not None:
        raise ConfigError(problem)
    return url


def copy_checkpoints(run: Path, config: RunConfig, folders: Sequence[Path], to: str, say: Callable[[str], None]) -> str:
    """Copy checkpoints of a run, and its small files.

    Args:
        run: its folder.
        config: of it.
        folders: of the checkpoints.
        to: a folder or a URL; they come into a folder of the run's name there, as checkpoint.copy_to has them.
        say: prints a line for each.

    Returns:
        Where they are.

    Raises:
        DataError: a file of the run is a link to elsewhere, which would be copied with it.
        StorageError: one is damaged here, or came out damaged there, or a disk or store refuses.
    """
    require_own_files(run)
    url, seconds = url_of(to), config.checkpoint.copy_timeout_seconds
    store = Store(url, config.name, seconds, key=_KEY)
    order = Order(str(run), url, config.name, config.checkpoint.keep, seconds, os.getpid())
    copier, there = Copier(order, store), store.steps()
    for folder in folders:
        step, began = step_of(folder), time.monotonic()
        manifest = require_files(folder)
        size = sum(file.bytes for file in manifest.files.values()) / 1e6
        if step in there and _is_there(store, there[step], manifest):
            say(f"{folder.name} was there already, verified ({size:,.1f} MB)")
            continue
        if not copier.copy(step, manifest):
            raise StorageError(f"{folder}: was removed while it was copied. Is the run being trained? Name another.")
        say(f"{folder.name} is in {store.url}, verified ({size:,.1f} MB, {time.monotonic() - began:.1f} s)")
    copier.copy_records()
    return store.url


def _is_there(store: Store, name: str, manifest: Manifest) -> bool:
    """Whether the store has exactly this checkpoint, every byte of it."""
    try:
        if manifest_of(store, name) != manifest:
            return False
    except StorageError:
        return False
    return all(store.digest(f"{name}/{each}") == expected for each, expected in manifest.files.items())


def verify_copies(store: Store, only: int | None, say: Callable[[str], None]) -> list[str]:
    """Read the checkpoints of a second home and compare them with the manifests there.

    Args:
        store: the run's folder there.
        only: the one step that is wanted.
        say: prints a line for each that is whole.

    Returns:
        What is wrong, a line for each checkpoint that is damaged.

    Raises:
        RunError: the store cannot be asked.
    """
    wrong = []
    for step, name in sorted(store.steps().items()):
        if only not in (None, step):
            continue
        try:
            manifest = manifest_of(store, name)
            for each, expected in manifest.files.items():
                if (found := store.digest(f"{name}/{each}")) != expected:
                    raise StorageError(f"{store.url}/{name}/{each}: {found}, the manifest says {expected}")
        except StorageError as error:
            wrong.append(str(error))
            continue
        say(f"{store.url}/{name}: valid")
    return wrong
