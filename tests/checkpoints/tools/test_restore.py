"""Roll back to an older checkpoint. If this breaks, a rollback loses the work that it was meant to keep, or the next
start resumes from a checkpoint that was rolled back.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from modernbert_train.__main__ import main
from modernbert_train.checkpoints.replica import fetch_newest
from modernbert_train.checkpoints.run_folder import take_lock
from modernbert_train.checkpoints.store import Store
from modernbert_train.errors import StorageError
from tests.checkpoints.tools.small_run import SmallRun
from tests.support.runs import newest, records
from tests.support.tiny_run import TinyRun

pytestmark = pytest.mark.runs


def aside(run: SmallRun) -> list[Path]:
    return sorted((run.checkpoints / "superseded").glob("*/step-*"))


def test_newer_ones_are_set_aside_and_nothing_else_is_touched(run: SmallRun) -> None:
    before = run.bytes()
    said = run.says("restore", run.folder, "300")
    assert "the next start of" in said and "resumes from step 300, 3,000 tokens, phase short" in said
    assert newest(run.folder).step == 300 and run.steps() == [100, 200, 300]
    (folder,) = {path.parent for path in aside(run)}
    assert [path.name for path in aside(run)] == ["step-00000400", "step-00000500"]
    after = {name.removeprefix(f"superseded/{folder.name}/"): content for name, content in run.bytes().items()}
    record = (run.folder / "metrics.jsonl").read_bytes()
    assert after == before | {"metrics.jsonl": record}, "every file is unchanged, in its place or moved aside"
    said = run.says("list", run.folder)
    assert "3 whole checkpoints" in said and said.count("set aside  ") == 2
    assert f"set aside by `checkpoints restore`: superseded/{folder.name}/step-00000400" in said


def test_the_newest_needs_nothing(run: SmallRun) -> None:
    before = run.bytes()
    assert "resumes from step 500" in run.says("restore", run.folder, "500")
    assert run.bytes() == before and not (run.checkpoints / "superseded").exists()


def test_damaged_newer_ones_are_set_aside_too(run: SmallRun) -> None:
    """Otherwise each start would warn of the checkpoints that were rolled back."""
    run.flip(500)
    (run.at(400) / "MANIFEST.json").write_text("{")
    run.says("restore", run.folder, "300")
    assert newest(run.folder).step == 300 and run.steps() == [100, 200, 300]


def test_what_cannot_be_restored_changes_nothing(run: SmallRun) -> None:
    run.flip(300)
    before = run.bytes()
    assert "model.safetensors: damaged" in run.says("restore", run.folder, "300", code=74)
    assert "Nothing was changed" in run.says("restore", run.folder, "42", code=74)
    with take_lock(run.folder, "no"):
        said = run.says("restore", run.folder, "200", code=78)
        assert "in use by process" in said and "stop that job first" in said
    assert run.bytes() == before


def test_an_interrupted_restore_loses_nothing_and_is_completed_by_the_same_command(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run.bytes()
    real, calls = Path.rename, []

    def once(self: Path, target: Path) -> Path:
        calls.append(self)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", once)
        with pytest.raises(KeyboardInterrupt):
            main(["checkpoints", "restore", str(run.folder), "300"])
    assert newest(run.folder).step == 400, "the newest is moved first"
    run.says("restore", run.folder, "300")
    assert newest(run.folder).step == 300
    names = {name.rpartition("back-to-step-00000300/")[2] for name in run.bytes()}
    assert names == before.keys() | {"metrics.jsonl"}


def test_newer_copies_do_not_come_back(copied: SmallRun) -> None:
    """The replica has 300 and 500; without this the next start would bring 500 back."""
    said = copied.says("restore", copied.folder, "400")
    assert "step-00000500 is set aside in" in said
    fetch_newest(copied.config.checkpoint, Path(copied.config.folder), print)
    assert newest(copied.folder).step == 400
    (moved,) = copied.there.glob("superseded/*/step-00000500")
    assert {path.name for path in moved.iterdir()} == {path.name for path in copied.at(400).iterdir()}
    assert Store(copied.url, "small", 5.0).steps().keys() == {300}


def test_a_store_that_fails_meanwhile_changes_nothing_here(copied: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "move_folder", Mock(side_effect=StorageError("the store is away.")))
    before = copied.bytes()
    said = copied.says("restore", copied.folder, "300", code=74)
    assert "the store is away" in said and "--local" in said and copied.bytes() == before
    copied.says("restore", copied.folder, "300", "--local")
    assert newest(copied.folder).step == 300


def test_what_is_damaged_or_gone_here_comes_from_the_replica(copied: SmallRun) -> None:
    copied.flip(300)
    shutil.rmtree(copied.at(500))
    assert "was brought back from" in copied.says("restore", copied.folder, "500")
    assert newest(copied.folder).step == 500
    assert "model.safetensors: damaged" in copied.says("restore", copied.folder, "300")
    assert newest(copied.folder).step == 300


@pytest.mark.timeout(200)
def test_a_run_that_was_rolled_back_ends_as_it_did(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained, rolled back, trained again: the same record, the same weights, and the report counts the lost steps."""
    words, folder = tiny_run("checkpoint.interval_steps=3", "checkpoint.keep=9"), tmp_path / "runs/tiny"
    assert main(["train", *words]) == 0
    first, last = records(folder), newest(folder)
    assert main(["checkpoints", "restore", str(folder), "3"]) == 0
    capsys.readouterr()
    assert main(["train", *words]) == 0
    assert "step-00000003" in capsys.readouterr().out and records(folder) == first
    again = newest(folder)
    assert again.step == last.step
    old = next((folder / "checkpoints/superseded").glob(f"*/{again.folder.name}"))
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (again.folder / name).read_bytes() == (old / name).read_bytes()
