"""Large files are read once on each machine. If this breaks, eight ranks hash the same gigabytes at each start."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from modernbert_train.errors import DataError
from modernbert_train.ranks.read_per_node import read_once_per_node
from modernbert_train.read_once import read_once
from tests.distributed.gloo import run_ranks

calls: list[Path] = []


def content(path: Path) -> str:
    calls.append(path)
    return path.read_text()


def ask(file: str) -> tuple[list[str], int]:
    return [read_once_per_node(lambda: read_once(Path(file), content), content) for _ in range(2)], len(calls)


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
def test_what_is_damaged_is_told_by_all_of_them() -> None:
    assert run_ranks(refuse, 2) == ["damaged"] * 2
