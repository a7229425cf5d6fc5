"""Atomic writes: after a crash, a full disk or a power cut a file is complete or absent."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from modernbert_train.core.files import (
    append_line,
    lock_now,
    publish,
    sweep,
    unlock,
    whole_file,
    whole_folder,
    write_whole,
)


def _full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_file_that_cannot_be_written_is_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    path = tmp_path / "config.yaml"
    write_whole(path, "old\n")
    monkeypatch.setattr(*((os, "fsync") if fails == "fsync" else (Path, "replace")), _full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "new\n")
    assert path.read_text() == "old\n"
    assert os.listdir(tmp_path) == ["config.yaml"]


def test_the_disk_has_the_text_before_it_has_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("fsync"), fsync(handle))[1])
    monkeypatch.setattr(Path, "replace", lambda self, other: (done.append("replace"), replace(self, other))[1])
    write_whole(tmp_path / "a", "text")
    assert done == ["fsync", "replace"]


def test_a_folder_gets_its_name_last_and_hands_back_what_stood_there(tmp_path: Path) -> None:
    for name in ("out", "staging"):
        (tmp_path / name / "below").mkdir(parents=True)
        (tmp_path / name / "below" / "file").write_text(name)
    replaced = publish(tmp_path / "staging", tmp_path / "out")
    assert (tmp_path / "out/below/file").read_text() == "staging"
    assert replaced == tmp_path / "staging-replaced"
    assert (replaced / "below/file").read_text() == "out"
    (tmp_path / "next").mkdir()
    assert publish(tmp_path / "next", tmp_path / "other") is None


def test_a_folder_that_cannot_be_named_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("out", "staging"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    rename = Path.rename

    def refuse(self: Path, other: Path) -> Path:
        if self.name == "staging":
            _full()
        return rename(self, other)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="No space"):
        publish(tmp_path / "staging", tmp_path / "out")
    assert (tmp_path / "out/file").read_text() == "out"


def test_locks_are_of_open_files_and_may_be_shared(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as first, (tmp_path / "lock").open("w") as second:
        assert lock_now(first)
        assert not lock_now(second)
        assert not lock_now(second, shared=True)
        unlock(first)
        assert lock_now(first, shared=True)
        assert lock_now(second, shared=True)


def test_a_line_is_not_added_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("stays")
    (tmp_path / "record").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        append_line(tmp_path / "record", "line")
    assert (tmp_path / "victim").read_text() == "stays"


WRITER = """
import sys, time
from pathlib import Path
from modernbert_train.core.files import whole_file, whole_folder
out = Path(sys.argv[1])
with whole_folder(out / "model") as folder, whole_file(out / "v.npy") as file:
    (folder / "half").write_text("x")
    file.write(b"half")
    file.flush()
    print("ready", flush=True)
    time.sleep(60)
"""


@contextmanager
def at_work(out: Path) -> Iterator[None]:
    """Another process is in the middle of a file and of a folder; it is killed at the end."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(out)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


def as_of_another_host(path: Path, age: float) -> Path:
    """The same as a writer elsewhere would have left it, so many seconds ago."""
    moved = path.rename(path.with_name(path.name.replace(os.uname().nodename, "elsewhere")))
    touch(moved, time.time() - age)
    return moved


def touch(path: Path, seconds: float) -> None:
    """Set the time of a file or folder and of all in it."""
    for each in (*path.rglob("*"), path):
        os.utime(each, (seconds, seconds))


@pytest.mark.runs
@pytest.mark.parametrize("next_name", ["model", "other"])
def test_what_a_killed_writer_left_goes_with_the_next_write_and_a_living_one_keeps_its_own(
    tmp_path: Path, next_name: str
) -> None:
    """kill -9 runs no clean-up: a whole model would stay in a hidden folder for good, one more for each kill."""
    with at_work(tmp_path):
        theirs = {*os.listdir(tmp_path)}
        with whole_file(tmp_path / "a") as file:
            file.write(b"a")
        assert {*os.listdir(tmp_path)} == theirs | {"a"} and len(theirs) == 2
    with whole_folder(tmp_path / next_name) as folder:
        (folder / "whole").write_text("x")
    assert sorted(os.listdir(tmp_path)) == ["a", next_name] and os.listdir(tmp_path / next_name) == ["whole"]


@pytest.mark.runs
def test_what_another_host_left_goes_once_it_is_quiet(tmp_path: Path) -> None:
    """Its processes cannot be looked for; without its lock it is known by its writes, and a living one by its lock."""
    with at_work(tmp_path):
        held = [as_of_another_host(path, 3600) for path in tmp_path.glob(".*.partial")]
        sweep(tmp_path)
        assert len(held) == 2 and all(path.exists() for path in held)
    for path in held:
        touch(path, time.time())
    sweep(tmp_path)
    assert all(path.exists() for path in held), "just written"
    for path in held:
        touch(path, 0)
    sweep(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_had_moved_its_predecessor_aside_when_it_was_killed_gets_its_name(tmp_path: Path) -> None:
    """Between two renames neither has the name; both would be lost as leftovers."""
    left = tmp_path / ".model.elsewhere-1.partial"
    for name in ("model", "model-replaced"):
        (left / name).mkdir(parents=True)
        (left / name / "file").write_text(name)
    touch(left, 0)
    sweep(tmp_path)
    assert os.listdir(tmp_path) == ["model"] and (tmp_path / "model/file").read_text() == "model"
