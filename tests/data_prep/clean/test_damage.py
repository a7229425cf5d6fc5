"""A source lost to a wrong column, delimiter or encoding must not become a smaller dataset with exit code 0."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from data_prep.clean.clean_documents import SourceTally, Tally
from data_prep.clean.damage import damaged_sources
from data_prep.read.documents import Document, read_source
from data_prep.tokenizer import main as tokenizer_main
from modernbert_train.config.tools.prepare import PrepareConfig, SourceConfig
from modernbert_train.data.read.rows import LeftOut
from tests.support.corpora import Command, Refusal, report_of, write_rows

DATA = 65


def rows(file: Path, names: str = "body") -> None:
    """Write 40 documents in a column that is not called text."""
    write_rows(file, [{"n": i, names: f"{names} of document {i}, with some words"} for i in range(40)])


@pytest.mark.runs
@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_wrong_text_column_does_not_cost_its_source(
    command: Command, refusal: Refusal, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """A quarter of a corpus was gone with exit code 0: "1 unreadable" of CSV and Parquet, "372 no_text" of JSONL."""
    file = tmp_path / f"more.{kind}"
    rows(file)
    more = [f"sources.more.kind={kind}", f"sources.more.path={file}"]
    error = refusal(DATA, *more)
    assert "sources.more: none of its" in error and "no_text" in error and "'text' among 'n', 'body'" in error
    assert "Set sources.more.text_field to the one that holds the text." in error
    assert command(*more, "sources.more.text_field=body") == 0
    *_, head, mine, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["source", "in", "kept", "left", "out"]
    assert mine.split() == ["mine", "60", "60", "0"] and last.split() == ["more", "40", "40", "0"]
    assert command(f"out={tmp_path}/less", *more, "sources.more.max_left_out=1") == 0
    assert report_of(tmp_path / "less")["sources"]["more"]["dropped"]["no_text"]
    assert "no_text" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.runs
@pytest.mark.parametrize(
    ("kind", "content", "said"),
    [
        ("jsonl", b"", "it holds no document|a file without any document"),
        ("csv", b"id;text\n1;a\n", "no column 'text' among 'id;text'.*seems to be \";\": set delimiter: \";\""),
        ("csv", b"id\ttext\n1\tone\n", r"set delimiter: \"\\t\""),
        ("csv", b"text\none, two\nthree, four\n", "2 cells in a row, the header names 1"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(
    refusal: Refusal, tmp_path: Path, kind: str, content: bytes, said: str
) -> None:
    """In each case a source was missing, with exit code 0."""
    file = tmp_path / f"more.{kind}"
    file.write_bytes(content)
    error = refusal(DATA, f"sources.more.kind={kind}", f"sources.more.path={file}")
    assert "sources.more: none of its" in error and re.search(said, error), error


@pytest.mark.runs
def test_a_file_cut_short_counts_by_its_bytes(refusal: Refusal, corpus: Path, texts: list[str]) -> None:
    """The rest of a file counts as one item, however many documents it contained."""
    for number in range(3):
        lines = b"\n".join(json.dumps({"text": f"{number}{text * 20}"}).encode() for text in texts * 4)
        packed = gzip.compress(lines)
        (corpus / f"{number}.jsonl.gz").write_bytes(packed[: len(packed) // 2] if number == 2 else packed)
    error = refusal(DATA, "sources.mine.kind=jsonl")
    assert "bytes are in files that cannot be read to the end, more than max_left_out=0.01" in error
    assert "2.jsonl.gz" in error


def test_rows_with_too_many_cells_are_not_shifted(tmp_path: Path) -> None:
    """pandas made " there" of the first row and "1" of the second."""
    (tmp_path / "a.csv").write_text("text,n\nhello, there, you\nyes,1\n")
    first, second = read_source("a", SourceConfig(kind="csv", path=str(tmp_path / "a.csv")), 1000)
    assert isinstance(first, LeftOut) and first.reason == "not_csv"
    assert isinstance(second, Document) and second.text == "yes"
    (tmp_path / "b.csv").write_text("n\ttext\n1\thello, there\n")
    (only,) = read_source("b", SourceConfig(kind="csv", path=str(tmp_path / "b.csv"), delimiter="\t"), 1000)
    assert isinstance(only, Document) and only.text == "hello, there"


def test_one_bad_byte_in_a_csv_costs_one_row(tmp_path: Path) -> None:
    """The rest of the file used to be lost with it."""
    (tmp_path / "a.csv").write_bytes(b"text\none\ncaf\xe9\nthree\n")
    items = list(read_source("a", SourceConfig(kind="csv", path=str(tmp_path / "a.csv")), 1000))
    assert [item.text if isinstance(item, Document) else item.reason for item in items] == ["one", "not_utf8", "three"]


@pytest.mark.parametrize(
    ("read", "dropped", "damaged", "said"),
    [
        (1000, {}, {"no_text": 10}, None),  # a share of 0.01 is allowed
        (1000, {}, {"no_text": 11}, "11 of 1,000 documents"),
        (1000, {"too_short": 900}, {}, None),  # dropping sound text is not a loss
        (1000, {}, {"empty": 400}, None),  # many documents may be empty
        (1000, {}, {"empty": 600}, "600 of 1,000"),  # but so many mean a wrong column
        (1000, {"gopher": 1000}, {}, "none of its 1,000"),
        (1000, {"duplicate": 1000}, {}, None),  # another source has them
        (0, {}, {}, "it holds no document"),
    ],
)
def test_how_much_is_too_much(read: int, dropped: Any, damaged: Any, said: str | None) -> None:
    """A check that lets all pass, or refuses sound data, would be switched off."""
    counts = SourceTally(read)
    counts.dropped.update(dropped | damaged)
    counts.damaged.update(damaged)
    counts.documents["train"] = read - sum((dropped | damaged).values())
    config = PrepareConfig(out="out", sources={"a": SourceConfig(kind="text", path="x")})
    found = [lost for _, lost, _ in damaged_sources(config, Tally({"a": counts}))]
    assert (said is None and not found) or (said is not None and said in found[0])
    free = PrepareConfig(out="out", sources={"a": SourceConfig(kind="text", path="x", max_left_out=1.0)})
    assert not list(damaged_sources(free, Tally({"a": counts})))


@pytest.mark.runs
def test_a_tokenizer_is_not_trained_on_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same wrong column used to train a tokenizer on the other files only."""
    rows(tmp_path / "a.jsonl", "text")
    rows(tmp_path / "b.jsonl")
    line = ["train", str(tmp_path / "out"), str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), "--kind", "jsonl"]
    assert tokenizer_main([*line, "--entries", "320", "--spare", "0"]) == DATA
    error = capsys.readouterr().err
    assert f"{tmp_path}/b.jsonl: none of its 40 documents is left" in error and "--text-field" in error
