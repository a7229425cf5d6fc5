"""Back to an older checkpoint and forth again. If this breaks, a rollback loses the work that it was meant to keep, or
the next start resumes from what was rolled back.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from modernbert_train.__main__ import main
from modernbert_train.checkpoints import set_aside
from modernbert_train.checkpoints.checkpoint import newest_valid
from modernbert_train.checkpoints.run_folder import RunFolder, take_lock
from modernbert_train.checkpoints.second_home import bring_back
from modernbert_train.checkpoints.set_aside import JOURNAL, Move, complete
from modernbert_train.checkpoints.store import Store
from modernbert_train.errors import StorageError
from tests import warm
from tests.checkpoints.tools.small_run import SmallRun
from tests.conftest import TIMES, TinyRun

pytestmark = pytest.mark.runs


def newest(run: SmallRun) -> int:
    found, passed_over = newest_valid(run.checkpoints)
    assert found is not None and passed_over == []
    return found.step


def aside(run: SmallRun) -> list[Path]:
    return sorted((run.checkpoints / "superseded").glob("*/step-*"))


def test_newer_ones_are_set_aside_and_nothing_else_is_touched(run: SmallRun) -> None:
    before = run.bytes()
    said = run.says("restore", run.folder, "300")
    assert "the next start of" in said and "resumes from step 300, 3,000 tokens, phase short" in said
    assert newest(run) == 300 and run.steps() == [100, 200, 300]
    (folder,) = {path.parent for path in aside(run)}
    assert [path.name for path in aside(run)] == ["step-00000400", "step-00000500"]
    after = {name.removeprefix(f"superseded/{folder.name}/"): content for name, content in run.bytes().items()}
    record = (run.folder / "metrics.jsonl").read_bytes()
    assert after == before | {"metrics.jsonl": record}, "every file is as it was, at its place or in the set"
    said = run.says("list", run.folder)
    assert "3 whole checkpoints" in said and said.count("set aside  ") == 2
    assert f"set aside by `checkpoints restore`: superseded/{folder.name}/step-00000400" in said


def test_the_same_command_goes_forth_again(run: SmallRun) -> None:
    before = run.bytes()
    record = (run.folder / "metrics.jsonl").read_bytes()
    run.says("restore", run.folder, "200")
    run.write(300, milestone=True)  # trained again, another way
    run.write(350)
    (run.folder / "metrics.jsonl").write_text('{"kind": "step", "step": 350}\n')
    assert "taken back from" in run.says("restore", run.folder, "400")
    assert newest(run) == 400 and run.steps() == [100, 200, 300, 400]
    assert (run.folder / "metrics.jsonl").read_bytes() == record, "the record of what is resumed from"
    for name, content in run.bytes().items():
        assert before.get(name, content) == content
    inside = {path.name for path in aside(run)}
    assert inside == {"step-00000300", "step-00000350", "step-00000500"}, "both lines are there"
    assert len({path.parent for path in aside(run)}) == 2, "each by itself"
    run.says("restore", run.folder, "500")
    assert newest(run) == 500 and run.steps() == [100, 200, 300, 400, 500]


def test_of_two_that_were_set_aside_each_can_be_named(run: SmallRun) -> None:
    run.says("restore", run.folder, "200")
    (first,) = {path.parent for path in aside(run)}
    original = (first / "step-00000300/MANIFEST.json").read_bytes()
    run.write(300, milestone=True)
    run.says("restore", run.folder, f"superseded/{first.name}/step-00000300")
    assert newest(run) == 300 and (run.at(300) / "MANIFEST.json").read_bytes() == original
    (other,) = [path for path in aside(run) if path.name == "step-00000300"]
    run.says("restore", run.folder, other)
    assert newest(run) == 300 and (run.at(300) / "MANIFEST.json").read_bytes() != original
    said = run.says("restore", run.folder, "superseded/20200101-000000-back-to-step-00000001/step-00000300", code=74)
    assert "has no step-00000300; see `checkpoints list`" in said


def test_the_newest_needs_nothing(run: SmallRun) -> None:
    before = run.bytes()
    assert "is the newest checkpoint" in run.says("restore", run.folder, "500")
    assert run.bytes() == before and not (run.checkpoints / "superseded").exists()


def test_damaged_newer_ones_are_set_aside_too(run: SmallRun) -> None:
    """Else each start would warn of what was rolled back."""
    run.flip(500)
    (run.at(400) / "MANIFEST.json").write_text("{")
    run.says("restore", run.folder, "300")
    assert newest(run) == 300 and run.steps() == [100, 200, 300]


def test_what_cannot_be_restored_changes_nothing(run: SmallRun) -> None:
    run.flip(300)
    before = run.bytes()
    assert "model.safetensors: damaged" in run.says("restore", run.folder, "300", code=74)
    assert "Nothing was changed" in run.says("restore", run.folder, "42", code=74)
    with take_lock(run.folder, "no"):
        said = run.says("restore", run.folder, "200", code=78)
        assert "in use by process" in said and "stop that job first" in said
        assert "in use by process" in run.says("prune", run.folder, "--yes", code=78)
    assert run.bytes() == before


def test_an_interrupted_restore_is_completed_by_whoever_comes_next(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole or not at all, wherever it stops: before the journal nothing has happened, behind it all will."""
    original = tmp_path / "original"
    shutil.copytree(run.folder, original)
    outcomes = []
    for stop in range(6):
        shutil.rmtree(run.folder)
        shutil.copytree(original, run.folder)
        calls = 0
        real, real_unlink = Path.rename, Path.unlink

        def counted(self: Path, *args: object, real: object = real) -> object:
            nonlocal calls
            calls += 1
            if calls > stop:  # noqa: B023
                raise KeyboardInterrupt
            return real(self, *args)  # type: ignore[operator]

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", counted)
            patch.setattr(Path, "unlink", lambda self, *args, real=real_unlink, **kw: counted(self, *args, real=real))
            patch.setattr(set_aside, "write_whole", _unpatched(real, set_aside.write_whole))
            try:
                main(["checkpoints", "restore", str(run.folder), "300"])
                outcomes.append("done")
            except KeyboardInterrupt:
                outcomes.append("stopped")
        assert newest(run) in (300, 400, 500)
        folder = RunFolder(run.config)
        folder.open()  # as `train` does before it looks for checkpoints
        folder.close()
        assert newest(run) == 300 and len(aside(run)) == 2 and not (run.checkpoints / JOURNAL).exists()
    assert outcomes[0] == "stopped" and outcomes[-1] == "done" and outcomes.count("stopped") == 3
    assert "completed a `checkpoints restore`" in capsys.readouterr().out


def _unpatched(real: object, call: object) -> object:
    """The journal is written by a rename of its own."""

    def inner(*args: object) -> None:
        patched, Path.rename = Path.rename, real  # type: ignore[assignment, misc]
        try:
            call(*args)  # type: ignore[operator]
        finally:
            Path.rename = patched  # type: ignore[method-assign]

    return inner


@pytest.mark.parametrize(
    "text",
    ["", "[" * 100_000, '{"folders": [["../../etc", "step-00000001"]], "metrics": null}',
     '{"folders": [["step-00000500", "/tmp/x"]], "metrics": null}', '{"folders": [], "metrics": "/etc/passwd"}'],
)  # fmt: skip
def test_a_hostile_journal_moves_nothing(run: SmallRun, text: str) -> None:
    before = run.bytes()
    (run.checkpoints / JOURNAL).write_text(text)
    with pytest.raises(StorageError, match=r"\.restore\.json: damaged"):
        RunFolder(run.config).open()
    assert "damaged" in run.says("restore", run.folder, "300", code=74)
    (run.checkpoints / JOURNAL).unlink()
    assert run.bytes() == before


def test_a_move_that_was_done_is_not_done_again(run: SmallRun) -> None:
    """A crash between the last rename and the journal's removal."""
    into = "superseded/20260101-000000-back-to-step-00000300"
    wanted = Move([("step-00000400", f"{into}/step-00000400"), ("step-00000500", f"{into}/step-00000500")], None)
    set_aside.move(run.checkpoints, wanted)
    after = run.bytes()
    (run.checkpoints / JOURNAL).write_text(json.dumps({"folders": wanted.folders, "metrics": None}))
    assert complete(run.checkpoints) and run.bytes() == after and not complete(run.checkpoints)


def test_newer_copies_do_not_come_back(copied: SmallRun) -> None:
    """The second home has 300 and 500; without more the next start would bring 500 back."""
    said = copied.says("restore", copied.folder, "400")
    assert "1 newer copy set aside in" in said
    bring_back(copied.config.checkpoint, Path(copied.config.folder), print)
    assert newest(copied) == 400
    (moved,) = copied.there.glob("superseded/*/step-00000500")
    assert {path.name for path in moved.iterdir()} == {path.name for path in copied.at(400).iterdir()}
    assert Store(copied.url, "small", 5.0).steps().keys() == {300}


def test_a_store_that_fails_meanwhile_changes_nothing_here(copied: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Store, name: str, to: str) -> None:
        raise StorageError(f"{self.url}/{name}: the store is away.")

    monkeypatch.setattr(Store, "move_folder", refused)
    before = copied.bytes()
    said = copied.says("restore", copied.folder, "300", code=74)
    assert "the store is away" in said and "--local" in said and copied.bytes() == before
    copied.says("restore", copied.folder, "300", "--local")
    assert newest(copied) == 300


def test_what_is_damaged_or_gone_here_comes_from_the_second_home(copied: SmallRun) -> None:
    copied.flip(300)
    shutil.rmtree(copied.at(500))
    assert "was brought back from" in copied.says("restore", copied.folder, "500")
    assert newest(copied) == 500
    assert "model.safetensors: damaged" in copied.says("restore", copied.folder, "300")
    assert newest(copied) == 300


@pytest.mark.timeout(200)
def test_a_run_that_was_rolled_back_ends_as_it_did(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Trained, rolled back, trained again: the same record, the same weights, and the report counts the lost steps."""
    words = tiny_run("checkpoint.interval_steps=3", "checkpoint.keep=9")
    folder = tmp_path / "runs/tiny"
    root = Path(__file__).parents[3]

    def call(*verb: str) -> str:
        command = [sys.executable, "-m", "modernbert_train", *verb]
        done = warm.run(command, cwd=root, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def record() -> list[dict[str, object]]:
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return [{k: v for k, v in each.items() if k not in TIMES} for each in lines if each["kind"] == "step"]

    call("train", *words)
    first, weights = record(), newest_valid(folder / "checkpoints")[0]
    assert weights is not None
    call("checkpoints", "restore", str(folder), "3")
    said = call("train", *words)
    assert "step-00000003" in said and record() == first
    again = newest_valid(folder / "checkpoints")[0]
    assert again is not None and again.step == weights.step
    old = next((folder / "checkpoints/superseded").glob(f"*/{again.folder.name}"))
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (again.folder / name).read_bytes() == (old / name).read_bytes()
