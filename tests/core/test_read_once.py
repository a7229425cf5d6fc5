"""Files read once: a result is reused as long as the file is the same, and not a moment longer.

If this breaks, a start hashes gigabytes again and again, or a replaced file passes for the one before.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from modernbert_train.core.read_once import asked_for, known, learn, read_once

calls: list[Path] = []


def content(path: Path) -> str:
    calls.append(path)
    return path.read_text()


def length(path: Path) -> int:
    return len(path.read_text())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that has stood there for a while."""
    path = tmp_path / "file"
    path.write_text("one")
    time.sleep(0.15)
    calls.clear()
    return path


def test_a_file_that_stays_is_read_once_by_each_reader(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [read_once(file, content) for _ in range(3)] == ["one"] * 3
    monkeypatch.chdir(file.parent)
    assert read_once(Path("file"), content) == "one"
    assert calls == [file]
    assert read_once(file, length) == 3


def test_a_file_that_was_exchanged_is_read_again(file: Path) -> None:
    """Also by one of the same size that carries the time of the one before, as `rsync -t` and `cp -p` do."""
    read_once(file, content)
    before = file.stat()
    file.write_text("two")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read_once(file, content) == "two"
    file.unlink()
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            read_once(file, content)


def test_what_has_just_been_written_is_not_remembered(tmp_path: Path) -> None:
    """The next write may carry the same time: clocks of file systems tick slower than programs write."""
    path = tmp_path / "file"
    for text in ("one", "two", "six") * 20:
        path.write_text(text)
        assert read_once(path, content) == text


def test_what_another_process_has_read_is_taken_over_while_the_file_is_the_same(file: Path) -> None:
    """Else each rank of a machine hashes the same gigabytes; or trusts a hash of something else."""
    read_once(file, content)
    with asked_for() as paths:
        read_once(file, content)
    ((path, identity, value),) = known(content, paths)
    calls.clear()
    learn(content, [(path, identity, f"{value}, as another says")])
    assert read_once(file, content) == "one, as another says" and not calls
    learn(content, [(path, (*identity[:-1], identity[-1] + 1), "of another file")])
    assert read_once(file, content) == "one, as another says"
    learn(content, [(path, identity, "old")])
    file.write_text("two")
    assert read_once(file, content) == "two"
