"""Large files are read once on each machine. If this breaks, eight ranks hash the same gigabytes at each start."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest

from modernbert_train.core.read_once import read_once
from modernbert_train.distributed.read_per_node import read_once_per_node
from modernbert_train.errors import DataError
from tests.support.gloo import run_ranks

calls: list[Path] = []


def content(path: Path) -> str:
    calls.append(path)
    return path.read_text()


def ask(file: str) -> tuple[list[str], int]:
    return [read_once_per_node(lambda: read_once(Path(file), content), content) for _ in range(2)], len(calls)


def ask_with_files_in(file: str, scratch: str) -> tuple[list[str], int]:
    tempfile.tempdir = scratch
    return ask(file)


def refuse() -> str:
    def damaged() -> None:
        raise DataError("damaged")

    with pytest.raises(DataError) as caught:
        read_once_per_node(damaged, content)
    return str(caught.value)


@pytest.mark.runs
def test_of_the_ranks_of_a_machine_one_reads(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("one")
    time.sleep(0.15)
    assert run_ranks(ask, 3, str(file)) == [(["one", "one"], int(rank == 0)) for rank in range(3)]


@pytest.mark.runs
def test_what_is_large_goes_through_a_file_that_is_gone_afterwards(tmp_path: Path) -> None:
    """The arrays of an index with a quarter of a million shards are megabytes, and a job has a thousand ranks."""
    file, scratch = tmp_path / "file", tmp_path / "scratch"
    file.write_text("one " * 50_000)
    scratch.mkdir()
    time.sleep(0.15)
    found = run_ranks(ask_with_files_in, 3, str(file), str(scratch))
    assert [(text == ["one " * 50_000] * 2, read) for text, read in found] == [(True, int(r == 0)) for r in range(3)]
    assert list(scratch.iterdir()) == []


@pytest.mark.runs
def test_where_no_file_can_be_written_each_rank_reads(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("one " * 50_000)
    time.sleep(0.15)
    found = run_ranks(ask_with_files_in, 2, str(file), str(tmp_path / "absent"))
    assert [read for _, read in found] == [1, 1]


@pytest.mark.runs
def test_what_is_damaged_is_reported_by_all_of_them() -> None:
    assert run_ranks(refuse, 2) == ["damaged"] * 2
