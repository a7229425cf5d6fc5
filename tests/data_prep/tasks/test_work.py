"""Division of large files: a document on a boundary must be read once, by exactly one task."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import datasets
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.read.documents import Document, read_span
from data_prep.tasks.work import cut, make_work, read_work
from modernbert_train.config.tools.prepare import PrepareConfig, SourceConfig
from modernbert_train.data.read.rows import LeftOut, Span
from modernbert_train.data.read.sources import whole_spans
from modernbert_train.errors import DataError

LIMIT = 100


def texts_of(items: list[Document | LeftOut]) -> list[str]:
    return [item.text if isinstance(item, Document) else item.reason for item in items]


def lines_of(file: Path, begin: int = 0, end: int | None = None) -> list[Document | LeftOut]:
    return list(read_span(Span("a", str(file), begin, end), SourceConfig(kind="jsonl", path=str(file)), LIMIT))


def config_of(path: Path, kind: str, **keys: object) -> PrepareConfig:
    return PrepareConfig(out="x", sources={"a": SourceConfig(kind=kind, path=str(path))}, **keys)  # type: ignore[arg-type]


@pytest.mark.runs
@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=12), min_size=1, max_size=12), st.data(), st.booleans())
def test_jsonl_cut_at_any_bytes_is_read_once(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], data: st.DataObject, ends: bool
) -> None:
    """For a cut before, on or after a newline, or inside a character of several bytes."""
    file = tmp_path_factory.mktemp("cut") / "a.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=bool(i % 2)) for i, text in enumerate(texts)]
    file.write_bytes(("\n".join(lines) + "\n" * ends).encode("utf-8", "surrogatepass"))
    size = file.stat().st_size
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=5)))
    whole = texts_of(lines_of(file))
    parts = [lines_of(file, begin, end) for begin, end in itertools.pairwise([0, *cuts, size])]
    assert texts_of([item for part in parts for item in part]) == whole
    assert len(whole) == len(texts)


def test_lines_later_in_a_file_are_named_by_their_byte(tmp_path: Path) -> None:
    """The lines before them have not been counted; the byte locates them as well (`tail -c +N`)."""
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": 2}\n')
    items = lines_of(tmp_path / "a.jsonl", begin=3)
    assert [item.id for item in items] == [f"{tmp_path}/a.jsonl at byte 16"]


@pytest.mark.runs
def test_endless_line_is_counted_and_passed_over(tmp_path: Path) -> None:
    """A file of 100 GB without a newline must not be read into memory, nor hide the lines after it."""
    long = json.dumps({"text": "x" * (20 << 20)}) + "\n"
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((long + '{"text": "after"}\n').encode(), 1))
    first, after = lines_of(tmp_path / "a.jsonl.gz")
    assert isinstance(first, LeftOut) and first.reason == "too_long" and f"a line of {len(long)} bytes" in first.detail
    assert texts_of([after]) == ["after"] and after.id.endswith(":2")


def test_parquet_is_cut_between_row_groups(tmp_path: Path) -> None:
    """Rows keep their number in the file, so that a damaged one can be found."""
    table = pyarrow.table({"text": [f"row {i}" if i != 7 else None for i in range(1, 21)], "n": list(range(20))})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=5)
    config = config_of(tmp_path / "a.parquet", "parquet", task_bytes=1)
    tasks = list(cut(config))
    assert [[(span.begin, span.end) for span in task] for task in tasks] == [[(i, i + 1)] for i in range(4)]
    items = [item for task in tasks for span in task for item in read_span(span, config.sources["a"], LIMIT)]
    assert [item.id.split(":")[1] for item in items] == [str(i) for i in range(1, 21)]
    assert texts_of(items)[5:8] == ["row 6", "no_text", "row 8"]
    second = Span("a", str(tmp_path / "a.parquet"), 1, 2)
    found = texts_of(list(read_span(second, config.sources["a"], LIMIT)))
    assert found == ["row 6", "no_text", "row 8", "row 9", "row 10"]


@pytest.mark.runs
def test_hub_dataset_is_read_in_the_parts_that_datasets_gives(tmp_path: Path) -> None:
    """A folder downloaded from the hub has many files, which one process would read alone."""
    for i in range(3):
        datasets.Dataset.from_dict({"text": [f"{i}a", f"{i}b"]}).to_parquet(str(tmp_path / f"train-{i}.parquet"))
    source = SourceConfig(kind="hub", path=str(tmp_path))
    spans = list(whole_spans("a", source))
    assert [(span.begin, span.end) for span in spans] == [(0, 3), (1, 3), (2, 3)]
    items = [item for span in spans for item in read_span(span, source, LIMIT)]
    assert texts_of(items) == ["0a", "0b", "1a", "1b", "2a", "2b"] and "part 2 of 3:1" in items[2].id


def test_tasks_depend_on_spec_and_files_alone(tmp_path: Path) -> None:
    """The number of cores, or the order in which a disk lists its files, must have none."""
    for i in range(40):
        (tmp_path / f"{i:02}.jsonl").write_text("{}\n" * (100 * (i % 4)))
    config = config_of(tmp_path, "jsonl", task_bytes=2000)
    tasks = list(cut(config))
    assert tasks == list(cut(config)) and len(tasks) > 10
    assert max(sum(span.size for span in task) for task in tasks) <= 2000
    spans = [span for task in tasks for span in task]
    assert [span.path for span in spans] == sorted(span.path or "" for span in spans)
    assert sum(span.size for span in spans) == sum(file.stat().st_size for file in tmp_path.iterdir())
    large = [span for span in spans if span.begin or span.end]
    assert large == []  # none is larger than a task
    assert len(list(cut(config_of(tmp_path, "jsonl", task_bytes=1 << 30)))) == 1


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    """Before it is read, and after."""
    (tmp_path / "a.txt").write_text("one")
    work = make_work(tmp_path / "work", config_of(tmp_path / "a.txt", "text"), {"asked": 1})
    assert read_work(tmp_path / "work") == (work, {"asked": 1}) and read_work(tmp_path) is None
    spans = work.spans(0)
    assert next(spans).path == str(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_text("other")
    with pytest.raises(DataError, match="has changed since this began"):
        next(spans)
    with pytest.raises(DataError, match="has changed since this began"):
        next(work.spans(0))
