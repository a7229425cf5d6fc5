"""Checkpoints on disk: after a crash, with a full disk or a flipped bit, and the checkpoint that is then found."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import xxhash

from modernbert_train.checkpoints import checkpoint, manifest
from modernbert_train.checkpoints.checkpoint import newest_valid, verify
from modernbert_train.checkpoints.manifest import MANIFEST, FileHash, read_manifest
from modernbert_train.checkpoints.removal import clean
from modernbert_train.checkpoints.verified import step_folders
from modernbert_train.errors import StorageError
from tests.support.small_checkpoint import CONFIG, WEIGHT, sign, state_of, write


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir())


def test_what_was_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    write(tmp_path, 7)
    found, passed_over = newest_valid(tmp_path)
    assert found is not None and found.step == 7 and passed_over == []
    assert torch.equal(found.weights()[WEIGHT], torch.full((4, 4), 7.0))
    assert found.optimizer()[f"step/{WEIGHT}"] == 7
    assert found.state == state_of(7) and found.config == CONFIG


def test_a_checkpoint_of_another_schema_says_what_to_do(tmp_path: Path) -> None:
    """An older schema without a hash in the manifest, and a newer one with it: the error must not say "damaged"."""
    write(tmp_path, 6)
    folder = write(tmp_path, 7)
    sign(folder, lambda content: content.update(schema=6))
    with pytest.raises(StorageError, match=r"step-00000007: of schema 6, this version reads 4 and 5\. Continue with"):
        verify(folder)
    old = {"schema": 1, "step": 7, "phase_end": False, "milestone": False, "files": {}}
    (folder / MANIFEST).write_text(json.dumps(old))
    with pytest.raises(StorageError, match=r"step-00000007: of schema 1, this version reads 4 and 5\. .* export it"):
        verify(folder)
    found, passed_over = newest_valid(tmp_path)
    assert found is not None and found.step == 6 and "of schema 1" in passed_over[0]


def test_no_folder_and_an_empty_folder_mean_a_fresh_start(tmp_path: Path) -> None:
    assert newest_valid(tmp_path / "absent") == (None, [])
    assert newest_valid(tmp_path) == (None, [])


@pytest.mark.runs
@pytest.mark.parametrize("name", [manifest.WEIGHTS, manifest.OPTIMIZER, manifest.STATE, MANIFEST])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_truncated_file_means_the_checkpoint_before(tmp_path: Path, name: str, share: float) -> None:
    write(tmp_path, 1)
    damaged = write(tmp_path, 2) / name
    content = damaged.read_bytes()
    damaged.write_bytes(content[: int(len(content) * share)])
    found, passed_over = newest_valid(tmp_path)
    assert found is not None and found.step == 1
    assert len(passed_over) == 1 and name in passed_over[0] and "step-00000002" in passed_over[0]


@pytest.mark.runs
def test_every_flipped_bit_is_seen_before_any_weight_is_used(tmp_path: Path) -> None:
    """In a manifest only its own hash protects the step, the reason to keep it, and the sizes."""
    folder, draw = write(tmp_path, 1, milestone=True), random.Random(0)
    paths = [path for path in sorted(folder.iterdir()) if path.name != MANIFEST]
    drawn = [(path, draw.randrange(8 * path.stat().st_size)) for path in draw.choices(paths, k=100)]
    in_manifest = [(folder / MANIFEST, bit) for bit in range(0, 8 * (folder / MANIFEST).stat().st_size, 9)]
    for path, bit in drawn + in_manifest:
        original = path.read_bytes()
        content = bytearray(original)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        with pytest.raises(StorageError, match=path.name):
            (read_manifest if path.name == MANIFEST else verify)(folder)
        path.write_bytes(original)
    verify(folder)


def test_only_damaged_checkpoints_never_mean_a_silent_start_at_zero(tmp_path: Path) -> None:
    (write(tmp_path, 1) / manifest.WEIGHTS).unlink()
    with pytest.raises(StorageError, match=r"no checkpoint is whole[\s\S]*model.safetensors[\s\S]*--fresh"):
        newest_valid(tmp_path)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_are_readable_by_whom_the_umask_says(tmp_path: Path, mask: int, mode: int) -> None:
    """Colleagues who may read the folder could not read the weights, with any umask."""
    before = os.umask(mask)
    try:
        folder = write(tmp_path, 1)
    finally:
        os.umask(before)
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == dict.fromkeys(
        (*manifest.FILES, MANIFEST), oct(mode)
    )


@pytest.mark.parametrize("files_written", range(4))
def test_a_crash_while_writing_leaves_nothing_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files_written: int
) -> None:
    write(tmp_path, 1)
    calls = itertools.count()

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def or_die(*args: Any) -> Any:
            if next(calls) == files_written:
                raise KeyboardInterrupt
            return call(*args)

        return or_die

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "write_hashed", dying(checkpoint.write_hashed))
        patched.setattr(FileHash, "of", dying(FileHash.of))
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path, 2)
    found, _ = newest_valid(tmp_path)
    assert found is not None and found.step == 1
    clean(tmp_path, keep=3)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_no_space_is_reported_with_both_numbers_and_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))
    with pytest.raises(StorageError, match=r"needs [\d,]+ bytes, 100 are free\. .* and set runs_folder; older"):
        write(tmp_path, 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(checkpoint, "publish", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(StorageError, match="No space left on device"):
        write(tmp_path, 2)
    assert steps(tmp_path) == [1]


@pytest.mark.runs
@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        pytest.param(1, {2, 4, 6}, id="the newest alone"),
        pytest.param(2, {2, 4, 5, 6}, id="the newest two"),
        pytest.param(3, {2, 4, 5, 6}, id="a milestone takes a place among the newest"),
        pytest.param(5, {2, 3, 4, 5, 6}, id="the end of a phase as well"),
        pytest.param(6, {1, 2, 3, 4, 5, 6}, id="as many as there are"),
        pytest.param(99, {1, 2, 3, 4, 5, 6}, id="more than there are"),
    ],
)
def test_which_checkpoints_are_kept(tmp_path: Path, keep: int, kept: set[int]) -> None:
    """Six checkpoints; the second ends a phase and the fourth is a milestone."""
    for step in range(1, 7):
        write(tmp_path, step, phase_end=step == 2, milestone=step == 4)
    clean(tmp_path, keep)
    assert set(steps(tmp_path)) == kept


@pytest.mark.runs
def test_nothing_is_removed_on_the_word_of_a_damaged_manifest(tmp_path: Path) -> None:
    """A bit that turns the end of a phase into an ordinary checkpoint, a copy, another schema, other folders: these
    stay, and none of them counts as one of the checkpoints to keep."""
    for step in range(1, 6):
        write(tmp_path, step, phase_end=step == 2)
    damaged = tmp_path / "step-00000002" / MANIFEST
    damaged.write_text(damaged.read_text().replace("true", "false"))
    sign(tmp_path / "step-00000001", lambda content: content.update(schema=1))
    (tmp_path / "step-00000005").rename(tmp_path / "step-00000050")
    (write(tmp_path, 6) / MANIFEST).unlink()
    (tmp_path / "notes").mkdir()
    clean(tmp_path, keep=1)
    (tmp_path / "notes").rmdir()
    assert steps(tmp_path) == [1, 2, 4, 6, 50]


def test_a_checkpoint_written_again_replaces_a_damaged_one(tmp_path: Path) -> None:
    (write(tmp_path, 5) / manifest.STATE).write_text("torn")
    write(tmp_path, 5)
    found, passed_over = newest_valid(tmp_path)
    assert found is not None and found.step == 5 and passed_over == []


def test_a_pickle_instead_of_weights_is_never_opened(tmp_path: Path) -> None:
    folder = write(tmp_path, 1)
    marker = tmp_path / "executed"

    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (marker,))

    torch.save({"w": Payload()}, folder / manifest.WEIGHTS)
    sign(folder)  # even with a manifest that matches it
    with pytest.raises(StorageError, match="(?i)header"):
        verify(folder)
    assert not marker.exists()


def test_a_checkpoint_is_on_the_disk_before_it_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rename may reach the disk before the contents: after a power cut the newest checkpoint would be empty, and the
    one before it perhaps removed."""
    synced: set[int] = set()  # inodes
    at_rename: list[tuple[str, set[int], set[int]]] = []
    fsync, rename = os.fsync, Path.rename

    def note_sync(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def note_rename(self: Path, target: Path) -> Path:
        at_rename.append((target.name, {path.stat().st_ino for path in (*self.iterdir(), self)}, set(synced)))
        synced.clear()
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    final = write(tmp_path, 5)
    [(name, needed, found)] = at_rename
    assert name == final.name and len(needed) >= 6 and needed <= found
    assert tmp_path.stat().st_ino in synced, "the rename itself is not on the disk"


def test_steps_are_numbers_also_beyond_eight_digits(tmp_path: Path) -> None:
    """As text step-100000000 sorts before step-99999999: resuming would lose a day of training."""
    for step in (99_999_999, 100_000_000):
        write(tmp_path, step)
    found, _ = newest_valid(tmp_path)
    assert found is not None and found.step == 100_000_000
    clean(tmp_path, keep=1)
    assert steps(tmp_path) == [100_000_000]


def test_a_checkpoint_of_the_schema_before_is_read(tmp_path: Path) -> None:
    """Whole tensors without slices, as earlier versions wrote them: a run that began with one of those resumes."""
    folder = write(tmp_path, 3)
    now = verify(folder)
    content = json.loads((folder / MANIFEST).read_text()) | {"schema": 4}
    for name in ("weights", "optimizer", "xxh3_128"):
        del content[name]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    (folder / MANIFEST).write_text(json.dumps(content | {"xxh3_128": xxhash.xxh3_128_hexdigest(text.encode())}))
    then = verify(folder)
    for found, expected in ((then.weights(), now.weights()), (then.optimizer(), now.optimizer())):
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


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
