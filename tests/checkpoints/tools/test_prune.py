"""What may be removed. If this breaks, the last checkpoint that a run can resume from is gone."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from modernbert_train.__main__ import main
from tests.checkpoints.tools.small_run import SmallRun

pytestmark = pytest.mark.runs


@pytest.mark.parametrize(("action", "instead"), [("copy", "checkpoint.copy_to sends"), ("compare", "load_model opens")])
def test_an_action_that_was_removed_is_answered_with_what_replaces_it(
    run: SmallRun, capsys: pytest.CaptureFixture[str], action: str, instead: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoints", action, str(run.folder)])
    said = capsys.readouterr().err
    assert ended.value.code == 64 and f"error: {action} was removed: " in said and instead in said


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
