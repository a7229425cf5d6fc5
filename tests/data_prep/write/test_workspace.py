"""Complete or invisible: a partial dataset means a run trained on half the text."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from data_prep.write.workspace import storage_errors, workspace
from modernbert_train.errors import StorageError


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
