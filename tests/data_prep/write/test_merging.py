"""Writing shards: complete or invisible, and every document of every shard of every task once and in order."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from data_prep.write.merging import merge_split
from data_prep.write.workspace import storage_errors, workspace
from modernbert_train.data.mds import TokenShards
from modernbert_train.data.shard_writer import COLUMN, ShardWriter
from modernbert_train.errors import StorageError


def part(folder: Path, documents: list[list[int]]) -> Path:
    """Write a task's folder, with a few documents in each of its shards."""
    writer = ShardWriter(folder, 1000, "0" * 64, shard_bytes=128)
    for ids in documents:
        writer.write(ids)
    writer.finish()
    return folder


@pytest.mark.runs
def test_every_shard_of_every_task_is_there_in_order(tmp_path: Path) -> None:
    """Each task numbers its shards from 0: if one replaces another's, its documents are lost."""
    documents = [[task * 100 + number] * 20 for task in range(3) for number in range(7)]
    parts = [part(tmp_path / f"{task:05d}", documents[task * 7 : task * 7 + 7]) for task in range(3)]
    merge_split([*parts, tmp_path / "of a task without any"], tmp_path / "out")
    shards = json.loads((tmp_path / "out/index.json").read_text())["shards"]
    names = [shard["zip_data"]["basename"] for shard in shards]
    assert len(names) == len(set(names)) > 6 and names == sorted(names)
    assert sorted(path.name for path in (tmp_path / "out").glob("shard.*")) == names
    found = TokenShards(tmp_path / "out", COLUMN, 1000, 4)
    assert [found.read(index).tolist() for index in range(21)] == documents
    assert np.load(tmp_path / "out/token_counts.npy").sum() == 21 * 20


def test_a_shard_never_takes_the_place_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without hard links shards are copied; an existing file must not be overwritten."""
    from data_prep.write import merging

    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    with pytest.raises(FileExistsError):
        merging._link(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "b"

    def refuse(old: Path, new: Path) -> None:
        raise PermissionError(1, "no hard links here")

    monkeypatch.setattr(merging.os, "link", refuse)
    merging._link(tmp_path / "a", tmp_path / "c")
    assert (tmp_path / "c").read_text() == "a"


@pytest.mark.runs
def test_a_shard_that_is_cut_short_is_reported(tmp_path: Path) -> None:
    """A machine that crashed may have left a truncated file."""
    folder = part(tmp_path / "survey/x/00000/train", [[1] * 20])
    shard = max(folder.glob("shard.*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(StorageError, match="its index says"):
        merge_split([folder], tmp_path / "out")


def write_half(out: Path) -> None:
    with workspace(out) as folder:
        (folder / "a").write_text("second")
        raise KeyError


def test_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    """A failure in the middle leaves the previous files, and no litter."""
    out = tmp_path / "deep" / "out"
    with workspace(out) as folder:
        (folder / "a").write_text("first")
        assert not out.exists()
    with pytest.raises(KeyError):
        write_half(out)
    assert (out / "a").read_text() == "first"
    with workspace(out) as folder:
        (folder / "b").write_text("third")
    assert [path.name for path in out.iterdir()] == ["b"]
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_link_to_another_disk_stays_a_link(tmp_path: Path) -> None:
    """data/ -> /scratch is how users keep large data off a small disk."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "home").mkdir()
    link = tmp_path / "home" / "out"
    link.symlink_to(tmp_path / "scratch" / "out")
    for _ in range(2):
        with workspace(link) as folder:
            (folder / "a").write_text("x")
            assert folder.parents[1] == tmp_path / "scratch"
    assert link.is_symlink() and (tmp_path / "scratch" / "out" / "a").exists()


def test_a_writer_at_work_is_respected(tmp_path: Path) -> None:
    """The next start must never delete its work; what a killed one leaves is removed by `whole_folder`."""
    with workspace(tmp_path / "out") as folder:
        (folder / "half").write_text("x")
        with (
            pytest.raises(StorageError, match=r"another process is writing .* Wait for it"),
            workspace(tmp_path / "out"),
        ):
            pass
        assert (folder / "half").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_the_disk_has_no_part_in_is_not_blamed_on_it(tmp_path: Path) -> None:
    """At a limit of open files, a user who is asked to free space would free terabytes in vain."""
    for number, remedy in ((errno.EMFILE, "ulimit -n 4096"), (errno.ENOMEM, "Free memory"), (errno.ENOSPC, "Free spa")):
        found = pytest.raises(StorageError, match=f"{os.strerror(number)}.*{remedy}.*the same command again")
        with found as error, storage_errors(tmp_path, "out=..."):
            raise OSError(number, os.strerror(number), str(tmp_path / "a"))
        assert ("bytes free" in str(error.value)) == (number == errno.ENOSPC)
