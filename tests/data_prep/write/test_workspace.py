"""Complete or invisible: a partial dataset means a run trained on half the text."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import data_prep
from data_prep.write.workspace import storage_errors, workspace
from modernbert_train.errors import StorageError

WRITER = """
import sys, time
from pathlib import Path
from data_prep.write.workspace import workspace
with workspace(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("x")
    print("ready", flush=True)
    time.sleep(60)
"""


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


@pytest.mark.runs
def test_killed_writer_leaves_nothing_and_a_live_one_is_respected(tmp_path: Path) -> None:
    """After kill -9 the next start must clean up; and it must never delete the work of a live process."""
    out = tmp_path / "out"
    root = str(Path(data_prep.__file__).parent.parent)
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(out)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        with pytest.raises(StorageError, match=r"another process is writing .* Wait for it"), workspace(out):
            pass
        assert len(list(tmp_path.glob(".out.*.partial/out/half"))) == 1
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert not out.exists() and len(list(tmp_path.iterdir())) == 1
    with workspace(out) as folder:
        (folder / "whole").write_text("x")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_the_disk_has_no_part_in_is_not_blamed_on_it(tmp_path: Path) -> None:
    """At a limit of open files, a user who is asked to free space would free terabytes in vain."""
    for number, remedy in ((errno.EMFILE, "ulimit -n 4096"), (errno.ENOMEM, "Free memory"), (errno.ENOSPC, "Free spa")):
        found = pytest.raises(StorageError, match=f"{os.strerror(number)}.*{remedy}.*the same command again")
        with found as error, storage_errors(tmp_path, "out=..."):
            raise OSError(number, os.strerror(number), str(tmp_path / "a"))
        assert ("bytes free" in str(error.value)) == (number == errno.ENOSPC)
