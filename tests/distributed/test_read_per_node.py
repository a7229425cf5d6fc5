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


def ask(file: str, scratch: str) -> tuple[list[str], int]:
    tempfile.tempdir = scratch
    return [read_once_per_node(lambda: read_once(Path(file), content), content) for _ in range(2)], len(calls)


def refuse() -> str:
    def damaged() -> None:
        raise DataError("damaged")

    with pytest.raises(DataError) as caught:
        read_once_per_node(damaged, content)
    return str(caught.value)


@pytest.mark.runs
@pytest.mark.parametrize(
    ("copies", "scratch", "reads"),
    [
        pytest.param(1, "absent", [1, 0, 0], id="small"),
        # the arrays of an index with a quarter of a million shards are megabytes, and a job has a thousand ranks
        pytest.param(50_000, "scratch", [1, 0, 0], id="large, through a file"),
        pytest.param(50_000, "absent", [1, 1, 1], id="large, and no file can be written"),
    ],
)
def test_of_the_ranks_of_a_machine_one_reads(tmp_path: Path, copies: int, scratch: str, reads: list[int]) -> None:
    file = tmp_path / "file"
    file.write_text("one " * copies)
    (tmp_path / "scratch").mkdir()
    time.sleep(0.15)
    found = run_ranks(ask, 3, str(file), str(tmp_path / scratch))
    assert found == [(["one " * copies] * 2, read) for read in reads]
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.runs
def test_what_is_damaged_is_reported_by_all_of_them() -> None:
    assert run_ranks(refuse, 2) == ["damaged"] * 2
