"""Checkpoints on disk: what a crash, a full disk or a flipped bit may do to them, and what is found afterwards."""

from __future__ import annotations

import errno
import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from modernbert_train.errors import StorageError
from modernbert_train.train import checkpoint
from modernbert_train.train.checkpoint import Checkpoint, clean, commit, newest_valid, verify


def write(folder: Path, step: int, phase_end: bool = False) -> Checkpoint:
    return commit(
        folder,
        step,
        weights={"w": torch.arange(64, dtype=torch.float32) + step},
        optimizer={"exp_avg/w": torch.ones(64), "step/w": torch.tensor(step)},
        state={"step": step, "tokens": step * 10},
        config_yaml="name: x\n",
        phase_end=phase_end,
    )


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir())


def test_what_was_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    write(tmp_path, 7)
    found, passed_over = newest_valid(tmp_path)
    assert found is not None and found.step == 7 and passed_over == []
    assert torch.equal(found.weights()["w"], torch.arange(64, dtype=torch.float32) + 7)
    assert found.optimizer()["step/w"] == 7
    assert found.state.tokens == 70


def test_a_checkpoint_of_another_schema_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SCHEMA", 1)
    old = write(tmp_path, 7)
    monkeypatch.undo()
    with pytest.raises(StorageError, match=r"step-00000007: of schema 1, this version reads 2\. Go on with"):
        old.state()


def test_no_folder_and_an_empty_folder_mean_a_fresh_start(tmp_path: Path) -> None:
    assert newest_valid(tmp_path / "absent") == (None, [])
    assert newest_valid(tmp_path) == (None, [])


@pytest.mark.parametrize("name", [checkpoint.WEIGHTS, checkpoint.OPTIMIZER, checkpoint.STATE, checkpoint.MANIFEST])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_truncated_file_means_the_checkpoint_before(tmp_path: Path, name: str, share: float) -> None:
    write(tmp_path, 1)
    damaged = write(tmp_path, 2).folder / name
    content = damaged.read_bytes()
    damaged.write_bytes(content[: int(len(content) * share)])
    found, passed_over = newest_valid(tmp_path)
    assert found is not None and found.step == 1
    assert len(passed_over) == 1 and name in passed_over[0] and "step-00000002" in passed_over[0]


def test_every_flipped_bit_is_seen_before_any_weight_is_used(tmp_path: Path) -> None:
    folder = write(tmp_path, 1).folder
    draw = random.Random(0)
    for _ in range(100):
        path = draw.choice([p for p in sorted(folder.iterdir()) if p.name != checkpoint.MANIFEST])
        original = path.read_bytes()
        content = bytearray(original)
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        with pytest.raises(StorageError, match=path.name):
            verify(folder)
        path.write_bytes(original)
    verify(folder)


def test_only_damaged_checkpoints_never_mean_a_silent_start_at_zero(tmp_path: Path) -> None:
    (write(tmp_path, 1).folder / checkpoint.WEIGHTS).unlink()
    with pytest.raises(StorageError, match=r"no checkpoint is whole[\s\S]*model.safetensors[\s\S]*--fresh"):
        newest_valid(tmp_path)


def test_a_manifest_that_leaves_a_file_out_is_not_believed(tmp_path: Path) -> None:
    folder = write(tmp_path, 1).folder
    manifest = json.loads((folder / checkpoint.MANIFEST).read_text())
    del manifest["files"][checkpoint.OPTIMIZER]
    (folder / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(StorageError, match="does not list optimizer"):
        verify(folder)


@pytest.mark.parametrize("files_written", range(4))
def test_a_crash_while_writing_leaves_nothing_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files_written: int
) -> None:
    write(tmp_path, 1)
    real, calls = checkpoint._fingerprint, 0

    class Killed(BaseException):
        pass

    def die(path: Path) -> dict[str, object]:
        nonlocal calls
        calls += 1
        if calls > files_written:
            raise Killed
        return real(path)

    monkeypatch.setattr(checkpoint, "_fingerprint", die)
    with pytest.raises(Killed):
        write(tmp_path, 2)
    monkeypatch.setattr(checkpoint, "_fingerprint", real)
    found, _ = newest_valid(tmp_path)
    assert found is not None and found.step == 1
    clean(tmp_path, keep=3)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_no_space_is_said_with_both_numbers_and_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))
    with pytest.raises(StorageError, match=r"needs \d+ bytes, 100 are free"):
        write(tmp_path, 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "_write_text", full)
    with pytest.raises(StorageError, match="No space left on device"):
        write(tmp_path, 2)
    assert steps(tmp_path) == [1]


def test_retention_keeps_the_newest_and_the_ends_of_phases_and_touches_nothing_else(tmp_path: Path) -> None:
    for step in range(1, 8):
        write(tmp_path, step, phase_end=step == 2)
    (tmp_path / "step-00000003" / checkpoint.MANIFEST).unlink()  # not ours any more
    (tmp_path / "notes").mkdir()
    clean(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes",
        "step-00000002",
        "step-00000003",
        "step-00000006",
        "step-00000007",
    ]


def test_a_checkpoint_written_again_replaces_a_damaged_one(tmp_path: Path) -> None:
    (write(tmp_path, 5).folder / checkpoint.STATE).write_text("torn")
    write(tmp_path, 5)
    found, passed_over = newest_valid(tmp_path)
    assert found is not None and found.step == 5 and passed_over == []


def test_a_pickle_in_place_of_weights_is_never_opened(tmp_path: Path) -> None:
    folder = write(tmp_path, 1).folder
    marker = tmp_path / "executed"

    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (marker,))

    torch.save({"w": Payload()}, folder / checkpoint.WEIGHTS)
    manifest = json.loads((folder / checkpoint.MANIFEST).read_text())
    manifest["files"][checkpoint.WEIGHTS] = checkpoint._fingerprint(folder / checkpoint.WEIGHTS)
    (folder / checkpoint.MANIFEST).write_text(json.dumps(manifest))  # even with a manifest that vouches for it
    with pytest.raises(Exception, match="(?i)header"):
        verify(folder).weights()
    assert not marker.exists()
