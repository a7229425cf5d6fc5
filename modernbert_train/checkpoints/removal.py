"""Remove checkpoints that are no longer kept, and what crashed writes have left."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from modernbert_train.checkpoints.manifest import Manifest, kept_steps, read_manifest, step_folders
from modernbert_train.checkpoints.verified import PARTIAL, partial_folders
from modernbert_train.errors import StorageError


def clean(folder: Path, keep: int) -> None:
    """Remove remains of crashed writes, and all but the newest `keep` checkpoints, ends of phases and milestones.

    Only folders of checkpoint.py are touched: partial ones, and checkpoints with a valid manifest. A folder with a
    damaged manifest is left to the user. A checkpoint is renamed first, so a partial one is never visible.
    """
    if not folder.is_dir():
        return
    remove_partial(folder)
    manifests: dict[Path, Manifest] = {}
    for path in step_folders(folder):
        with suppress(StorageError):
            manifests[path] = read_manifest(path)
    kept = kept_steps(manifests.values(), keep)
    remove([path for path, manifest in manifests.items() if manifest.step not in kept])
    remove_partial(folder)


def remove(checkpoints: Iterable[Path]) -> None:
    """Remove checkpoints; each is renamed first. Folders that cannot be removed stay."""
    for path in checkpoints:
        aside = path.with_name(f"{path.name}{PARTIAL}-removed")
        with suppress(OSError):
            path.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)


def remove_partial(folder: Path) -> None:
    """Remove remains of crashed writes and of removals."""
    for path in partial_folders(folder):
        shutil.rmtree(path, ignore_errors=True)
