"""Copies that are verified, and what may be removed. If this breaks, a backup is not there when it is needed, or the
last checkpoint that a run can resume from is gone.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import IO

import pytest

from modernbert_train.copies.second_home import bring_back
from modernbert_train.copies.store import Store
from modernbert_train.run.checkpoint import newest_valid
from modernbert_train.run.manifest import FileHash
from tests.checkpoint_tools.small_run import SmallRun

pytestmark = pytest.mark.runs


def test_the_newest_valid_one_or_all_are_copied_bit_for_bit(run: SmallRun, tmp_path: Path) -> None:
    run.flip(500)
    said = run.says("copy", run.folder, "--to", tmp_path / "away")
    assert "taken instead: step-00000400" in said and "step-00000400 is in file://" in said
    for path in run.at(400).iterdir():
        assert (tmp_path / "away/small/step-00000400" / path.name).read_bytes() == path.read_bytes()
    shutil.rmtree(run.at(500))
    said = run.says("copy", run.folder, "--all", "--to", f"file://{tmp_path}/away")
    assert "step-00000400 was there already, verified" in said
    assert len(list((tmp_path / "away/small").glob("step-*"))) == 4
    assert (tmp_path / "away/small/record/metrics.jsonl").is_file()


def test_a_run_resumes_from_such_a_copy(run: SmallRun, tmp_path: Path) -> None:
    said = run.says("copy", run.folder, "300", "--to", tmp_path / "away")
    url = said.rpartition("checkpoint.copy_to=")[2].strip()
    shutil.rmtree(run.folder)
    config = replace(run.config, checkpoint=replace(run.config.checkpoint, copy_to=url))
    bring_back(config, print)
    found, _ = newest_valid(run.checkpoints)
    assert found is not None and found.step == 300


def test_damage_here_or_there_is_no_copy(run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run.flip(400)
    said = run.says("copy", run.folder, "--all", "--to", tmp_path / "away", code=74)
    assert "step-00000400/model.safetensors: damaged on this disk" in said
    assert not (tmp_path / "away/small/step-00000400").exists()
    real = Store.write

    def flip(self: Store, name: str, source: IO[bytes]) -> FileHash:
        content = source.read()
        real(self, name, BytesIO(bytes([content[0] ^ 1]) + content[1:]))
        return FileHash.of_text("x") if not content else real(Store("memory://x", "y", 1), name, BytesIO(content))

    monkeypatch.setattr(Store, "write", flip)
    said = run.says("copy", run.folder, "500", "--to", tmp_path / "other", code=74)
    assert "the store gives back other bytes" in said and not list((tmp_path / "other/small").glob("step-*"))


def test_where_it_cannot_go_is_said(run: SmallRun, tmp_path: Path) -> None:
    assert "--to=nosuch://x: no such kind of store" in run.says("copy", run.folder, "--to", "nosuch://x", code=78)
    said = run.says("copy", run.folder, "--to", "s3://me:secret1@host/x", code=78)
    assert "--to: has a password in it" in said and "secret1" not in said
    assert "Leave one out" in run.says("copy", run.folder, "300", "--all", "--to", tmp_path, code=78)
    (tmp_path / "file").write_text("")
    assert "error: " in run.says("copy", run.folder, "--to", tmp_path / "file", code=74)


def keep(run: SmallRun, number: int) -> None:
    run.set_config(replace(run.config, checkpoint=replace(run.config.checkpoint, keep=number)))


def test_only_what_the_rules_do_not_keep_is_removed_and_only_when_asked(run: SmallRun) -> None:
    keep(run, 1)
    left = run.checkpoints / "step-00000600.partial-7"
    left.mkdir()
    (left / "x").write_bytes(b"12345")
    before = run.bytes()
    size = sum(len(content) for name, content in before.items() if name[5:13] in ("00000300", "00000400")) + 5
    said = run.says("prune", run.folder)
    assert f"3 folders, {size:,} bytes, would be removed; the checkpoints of steps 100, 200, 500 stay" in said
    assert "--yes does it" in said and run.bytes() == before
    said = run.says("prune", run.folder, "--yes")
    assert f"3 folders, {size:,} bytes, removed" in said and run.steps() == [100, 200, 500]
    assert run.bytes() == {name: text for name, text in before.items() if name[5:13] in ("00000100", "00000200",
                                                                                        "00000500")}  # fmt: skip
    assert "0 folders, 0 bytes, would be removed" in run.says("prune", run.folder)


def test_damaged_ones_do_not_push_out_the_last_valid_one(run: SmallRun) -> None:
    keep(run, 1)
    run.flip(500)
    run.flip(400, "optimizer.safetensors")
    said = run.says("prune", run.folder, "--yes")
    assert "0 folders" in said and run.steps() == [100, 200, 300, 400, 500]
    said = run.says("prune", run.folder, "--yes", "--damaged")
    assert "damaged: " in said and run.steps() == [100, 200, 300]


def test_where_none_is_valid_nothing_is_removed(run: SmallRun) -> None:
    keep(run, 1)
    for step in run.steps():
        run.flip(step)
    said = run.says("prune", run.folder, "--yes", "--damaged", code=74)
    assert "no checkpoint is valid, so nothing is removed" in said and len(run.steps()) == 5


def test_what_was_set_aside_goes_only_when_named(run: SmallRun) -> None:
    run.says("restore", run.folder, "300")
    assert "0 folders" in run.says("prune", run.folder, "--yes")
    assert "set aside by" in run.says("prune", run.folder, "--superseded", "--yes")
    assert not (run.checkpoints / "superseded").exists() and run.steps() == [100, 200, 300]


def test_a_link_in_place_of_a_checkpoint_is_not_followed(run: SmallRun, tmp_path: Path) -> None:
    keep(run, 1)
    elsewhere = tmp_path / "elsewhere"
    shutil.move(run.at(300), elsewhere)
    os.symlink(elsewhere, run.at(300))
    run.says("prune", run.folder, "--yes")
    assert len(list(elsewhere.iterdir())) == 5 and not run.at(300).exists()
