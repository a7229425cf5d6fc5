"""A run on 2,000 languages begins with work that does not grow with the text, and holds little of it.

Counted, not timed: files opened, and bytes that Python and numpy hold. If this breaks, such a run waits for minutes on
a shared disk, or takes the memory of the machine before its first step.
"""

from __future__ import annotations

import os
import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from modernbert_train.clock import Clock
from modernbert_train.config.schema import StreamConfig
from modernbert_train.core import read_once
from modernbert_train.data.facts import read_facts
from modernbert_train.data.open_shards import open_streams
from modernbert_train.data.path import plan_path
from tests.support.make_shards import make_documents, make_shards
from tests.support.planned import run

STREAMS = 2000  # of which the fast test opens a twentieth


_opened: Counter[str] | None = None


def _count(event: str, arguments: tuple[object, ...]) -> None:
    if _opened is not None and event == "open":
        _opened[str(arguments[0])] += 1


sys.addaudithook(_count)  # cannot be taken away again; it counts within `counted` alone


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often each file is opened within."""
    global _opened
    _opened = Counter()
    try:
        yield _opened
    finally:
        _opened = None


def make_many(folder: Path, number: int, tokenizer: Path) -> list[Path]:
    """Folders of five documents in several shards; hard links, which count as separate files."""
    documents = make_documents(tokenizer, [20, 33, 47, 8, 60], seed=9)
    made = [folder / f"l{index:04}" for index in range(number)]
    make_shards(made[0], documents, tokenizer, shard_bytes=1 << 8)
    for other in made[1:]:
        other.mkdir()
        for file in made[0].iterdir():
            os.link(file, other / file.name)
    return made


@pytest.mark.weekly
@pytest.mark.runs
@pytest.mark.parametrize("number", [STREAMS // 20, pytest.param(STREAMS, marks=pytest.mark.slow)])
def test_two_thousand_languages_begin_with_work_that_is_counted(tmp_path: Path, tiny_data: Path, number: int) -> None:
    """Three small files of each are opened, seven times in all, and no shard; some kilobytes of each are held."""
    folders = make_many(tmp_path / "many", number, tiny_data / "tokenizer")
    settings = {"tokenizer": str(tiny_data / "tokenizer"), "alpha": 0.3}
    asked = run(64, streams={folder.name: StreamConfig(path=str(folder)) for folder in folders}, **settings)
    one = run(64, streams={"one": StreamConfig(path=str(folders[0]))}, **settings).data
    data, clock = asked.data, Clock.of(asked)
    next(plan_path(one, 1, clock, open_streams(one, 1, read_facts(one)).shards).planner)  # modules are imported late
    read_once._known.clear()
    tracemalloc.start()
    try:
        with counted() as opened:
            streams = open_streams(data, 1, read_facts(data))
            planned = plan_path(data, 1, clock, streams.shards)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    ours = Counter[str]()
    for name, times in opened.items():
        if name.startswith(str(tmp_path / "many")):
            ours[Path(name).name] += times
    assert ours == {"dataset.json": number, "index.json": 2 * number, "lengths.npy": 4 * number}
    assert held < 20_000 * number and peak < held + 10_000_000
    with counted() as opened:
        plan = next(planned.planner)
    assert not [name for name in opened if name.endswith(".mds")], "planning reads lengths alone"
    assert len(plan.streams) == number
