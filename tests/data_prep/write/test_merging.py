"""Joining the tasks' shards: every document of every shard of every task, once and in order."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from data_prep.write.merging import merge_split
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
