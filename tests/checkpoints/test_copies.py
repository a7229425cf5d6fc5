"""The replica of a run: which checkpoints are copied, kept there, and brought back.

If this breaks, a checkpoint that was reported as copied is missing when the machine is lost, or a damaged one is
restored.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import IO, Any
from unittest.mock import Mock

import pytest

from modernbert_train.checkpoints import copier
from modernbert_train.checkpoints.copier import Copier, Order, follow
from modernbert_train.checkpoints.manifest import MANIFEST, FileHash, read_manifest
from modernbert_train.checkpoints.removal import clean
from modernbert_train.checkpoints.replica import fetch_newest, refuse_fresh
from modernbert_train.checkpoints.store import RECORD, Store, problem_of
from modernbert_train.config.schema import RunConfig
from modernbert_train.errors import ConfigError, RunError, StorageError
from tests.support.runs import newest
from tests.support.small_checkpoint import CONFIG, flip_last_bit, write

WRITE = Store.write


class Home:
    """A run's folder, its replica on the same disk, and a copier between them."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.url = f"file://{folder}/store"
        self.there = folder / "store/small"
        self.config: RunConfig = replace(
            CONFIG,
            runs_folder=str(folder / "runs"),
            checkpoint=replace(CONFIG.checkpoint, copy_to=self.url, copy_timeout_seconds=2.0),
        )
        self.folder = Path(self.config.folder)
        self.checkpoints = self.folder / "checkpoints"
        self.order = Order(str(self.folder), self.url, "small", keep, 2.0, 0)
        self.store = Store(self.url, "small", 2.0)
        self.copier = Copier(self.order, self.store)

    def copy_all(self) -> list[int]:
        """Copy everything, and return the steps in order."""
        steps = []
        while (done := self.copier.copy_one()) is not None:
            steps.append(done["step"])
        return steps

    def names(self) -> list[str]:
        return sorted(path.name for path in self.there.glob("step-*"))


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_the_newest_and_what_is_kept_for_good_are_copied_bit_for_bit(home: Home) -> None:
    for step in (1, 2, 3, 4):
        write(home.checkpoints, step, phase_end=step == 1, milestone=step == 2)
    (home.folder / "metrics.jsonl").write_text('{"kind": "step", "step": 4}\n')
    done = home.copier.copy_one()
    assert done is not None and home.copy_all() == [1, 2]
    files = read_manifest(home.checkpoints / "step-00000004").files
    assert (done["step"], done["bytes"]) == (4, sum(file.bytes for file in files.values()))
    assert home.names() == ["step-00000001", "step-00000002", "step-00000004"]
    for name in home.names():
        for path in (home.checkpoints / name).iterdir():
            assert (home.there / name / path.name).read_bytes() == path.read_bytes()
    assert (home.there / RECORD / "metrics.jsonl").read_text() == '{"kind": "step", "step": 4}\n'
    assert home.copier.copy_one() is None


def test_what_is_saved_while_the_copier_looks_is_copied_before_it_ends(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is a run's last checkpoint, the most important one; listing takes seconds on a busy machine."""
    look, closed = Copier.copy_one, threading.Event()

    def slowly(self: Copier) -> dict[str, Any] | None:
        found = look(self)
        if not closed.is_set():
            write(home.checkpoints, 5)
            closed.set()
        return found

    monkeypatch.setattr(Copier, "copy_one", slowly)
    monkeypatch.setattr(copier, "_watch", lambda *_: None)
    assert follow(home.order, closed) == 0
    assert home.names() == ["step-00000005"]


def test_the_store_keeps_the_given_checkpoints(home: Home) -> None:
    for step in range(1, 7):
        write(home.checkpoints, step, phase_end=step == 2)
        clean(home.checkpoints, keep=1)
        home.copy_all()
    assert home.names() == ["step-00000002", "step-00000005", "step-00000006"]
    assert [path.name for path in sorted(home.checkpoints.iterdir())] == ["step-00000002", "step-00000006"]


def test_another_checkpoint_of_the_same_step_replaces_the_copy(home: Home) -> None:
    write(home.checkpoints, 3)
    home.copy_all()
    before = (home.there / "step-00000003" / MANIFEST).read_bytes()
    shutil.rmtree(home.checkpoints)
    write(home.checkpoints, 3, milestone=True)
    anew = Copier(home.order, home.store)  # as after a restart
    assert anew.copy_one() is not None and anew.copy_one() is None
    assert (home.there / "step-00000003" / MANIFEST).read_bytes() != before


def changed(store: Store, name: str, source: IO[bytes]) -> FileHash:
    content = source.read()
    WRITE(store, name, BytesIO(bytes([content[0] ^ 1]) + content[1:]))
    return WRITE(Store("memory://x", "y", 1), name, BytesIO(content))  # the bytes sent


@pytest.mark.parametrize(
    ("kind", "of_store", "message"),
    [
        ("step-", changed, r"step-00000003/\S+: the store gives back other bytes"),
        (RECORD, changed, r"record/metrics\.jsonl: the store gives back other bytes"),
        (RECORD, Mock(side_effect=StorageError("busy")), "busy"),
    ],
)
def test_a_checkpoint_is_there_only_whole_and_with_the_record_of_its_steps(
    home: Home, monkeypatch: pytest.MonkeyPatch, kind: str, of_store: Callable[..., FileHash], message: str
) -> None:
    """Otherwise a run restored on a new machine would have steps that its metrics lack."""
    write(home.checkpoints, 3)
    (home.folder / "metrics.jsonl").write_text('{"kind": "step", "step": 3}\n')
    monkeypatch.setattr(Store, "write", lambda *given: of_store(*given) if given[1].startswith(kind) else WRITE(*given))
    with pytest.raises(StorageError, match=message):
        home.copier.copy_one()
    assert home.store.steps() == {}
    monkeypatch.undo()
    home.copier.forget()
    assert home.copy_all() == [3] and (home.there / RECORD / "metrics.jsonl").exists()


def test_a_checkpoint_damaged_on_this_disk_is_not_copied(home: Home) -> None:
    flip_last_bit(next(write(home.checkpoints, 3).glob("*.safetensors")))
    with pytest.raises(StorageError, match="damaged on this disk"):
        home.copier.copy_one()
    assert home.store.steps() == {} and home.names() == []


def test_a_copy_that_broke_off_is_invisible_and_removed_by_the_next(home: Home) -> None:
    write(home.checkpoints, 3)
    home.copy_all()
    (home.there / "step-00000002").mkdir()
    (home.there / "step-00000002/state.json").write_text("{")
    assert set(home.store.steps()) == {3}
    write(home.checkpoints, 4)
    home.copy_all()
    assert home.names() == ["step-00000003", "step-00000004"]


def test_the_newer_of_both_homes_wins(home: Home) -> None:
    write(home.checkpoints, 2)
    home.copy_all()
    write(home.checkpoints, 3)
    fetch_newest(home.config.checkpoint, Path(home.config.folder), print)
    assert not (home.checkpoints / "step-00000002.partial").exists()
    assert max(path.name for path in home.checkpoints.iterdir()) == "step-00000003"
    home.copy_all()
    shutil.rmtree(home.checkpoints / "step-00000003")
    fetch_newest(home.config.checkpoint, Path(home.config.folder), print)
    assert (home.checkpoints / "step-00000003" / MANIFEST).exists()


@pytest.mark.parametrize("name", ["../../outside", "/outside", "a/b", "..", MANIFEST, None])
def test_where_no_copy_is_whole_nothing_is_restored(home: Home, tmp_path: Path, name: str | None) -> None:
    """A manifest cannot name a file elsewhere; None is for weights that are gone."""
    manifest = read_manifest(write(home.checkpoints, 3))
    home.copy_all()
    shutil.rmtree(home.folder)
    if name is None:
        next(home.there.glob("step-*/*.safetensors")).write_bytes(b"")
    else:
        replace(manifest, files=manifest.files | {name: FileHash(0, "")}).write(home.there / "step-00000003")
    with pytest.raises(StorageError, match="no checkpoint there is whole"):
        fetch_newest(home.config.checkpoint, Path(home.config.folder), print)
    assert not list(home.checkpoints.iterdir()) and not (tmp_path / "outside").exists()


@pytest.mark.parametrize(
    ("kind", "cut"),
    [("*.safetensors", True), ("*.safetensors", False), ("state.json", False), ("config.yaml", False)],
)
def test_a_damaged_copy_is_passed_over_for_the_one_before(
    home: Home, capsys: pytest.CaptureFixture[str], kind: str, cut: bool
) -> None:
    """Otherwise every later start would fail, although whole copies and an older local checkpoint exist."""
    for step in (2, 3):
        write(home.checkpoints, step)
        home.copy_all()
    file = next((home.there / "step-00000003").glob(kind))
    content = file.read_bytes()
    file.unlink()
    if cut:
        file.write_bytes(content[:-1])
    shutil.rmtree(home.folder)
    fetch_newest(home.config.checkpoint, Path(home.config.folder), print)
    assert newest(home.folder).step == 2
    assert "passed over a damaged copy" in capsys.readouterr().out


def test_a_damaged_file_of_the_record_does_not_end_every_later_start(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    """The configuration comes from the checkpoint, whose hash is known; readable parts of a record are used."""
    write(home.checkpoints, 3)
    (home.folder / "samples.jsonl").write_text('{"step": 3}\n')
    (home.folder / "faults.jsonl").write_text('{"step": 2}\n')
    home.copy_all()
    shutil.rmtree(home.folder)
    (home.there / RECORD / "samples.jsonl").write_bytes(b'{"st\x80p": 3}\n')
    fetch_newest(home.config.checkpoint, Path(home.config.folder), print)
    assert (home.folder / "config.yaml").read_bytes() == (home.there / "step-00000003/config.yaml").read_bytes()
    assert (home.folder / "faults.jsonl").read_text() == '{"step": 2}\n'
    assert "metrics.jsonl: not there, so it begins here" in capsys.readouterr().out


def test_a_store_that_cannot_be_asked_starts_nothing_from_zero(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Store, "steps", Mock(side_effect=StorageError("no route to host")))
    with pytest.raises(StorageError, match="nothing is started from zero"):
        fetch_newest(home.config.checkpoint, Path(home.config.folder), print)
    write(home.checkpoints, 1)
    fetch_newest(home.config.checkpoint, Path(home.config.folder), print)
    assert "cannot be read, so the local checkpoints are used" in capsys.readouterr().out


def test_fresh_is_refused_while_the_next_start_would_resume_from_there(home: Home) -> None:
    refuse_fresh(home.config.checkpoint, home.config.name)
    write(home.checkpoints, 7)
    home.copy_all()
    with pytest.raises(ConfigError, match="up to step 7"):
        refuse_fresh(home.config.checkpoint, home.config.name)


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("/mnt/disk", "not a URL"),
        ("s4://bucket/x", "no such kind of store"),
        ("s3://me:secret@host/x", "has a password in it"),
    ],
)
def test_a_url_is_judged_before_anything_starts(url: str, found: str) -> None:
    problem = problem_of(url)
    assert problem is not None and found in problem and "secret" not in problem
    assert problem_of("file:///other/disk") is None


def test_errors_of_a_store_are_ours(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, kind in ((PermissionError("x"), ConfigError), (TimeoutError("x"), StorageError)):
        monkeypatch.setattr(home.store._fs, "ls", Mock(side_effect=error))
        with pytest.raises(RunError) as caught:
            home.store.steps()
        assert type(caught.value) is kind and home.store.url in str(caught.value)
