"""Order of checkpoints by step, and interrupted removal: a folder with a checkpoint's name is always whole."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from modernbert_train.checkpoints.checkpoint import newest_valid
from modernbert_train.checkpoints.removal import clean
from modernbert_train.checkpoints.verified import step_folders
from tests.support.small_checkpoint import write


def test_the_newest_is_the_one_of_the_most_steps_and_not_the_youngest_file(tmp_path: Path) -> None:
    """A copy or a restored old checkpoint is a younger file; training would silently resume from it."""
    for age, step in enumerate((12, 3)):
        write(tmp_path, step)
        os.utime(tmp_path / f"step-{step:08d}", (1000 + age, 1000 + age))
    found, _ = newest_valid(tmp_path)
    assert found is not None and found.step == 12


def test_a_removal_that_is_killed_leaves_nothing_under_a_checkpoints_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)

    def killed_half_way(path: Path, **_: Any) -> None:
        next(Path(path).glob("*.safetensors")).unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed_half_way)
    with pytest.raises(KeyboardInterrupt):
        clean(tmp_path, keep=1)
    for folder in step_folders(tmp_path):
        assert len(list(folder.glob("*.safetensors"))) == 2, folder
    monkeypatch.undo()
    clean(tmp_path, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
