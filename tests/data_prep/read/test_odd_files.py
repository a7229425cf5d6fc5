"""Files that are not text, and small files that unpack to gigabytes: a program that opens them never ends."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from data_prep.read.documents import Document, read_source
from data_prep.sample import look_at_text
from modernbert_train.__main__ import main
from modernbert_train.config.tools.prepare import PrepareConfig, SourceConfig
from modernbert_train.data.read.files import passed_over, source_files
from modernbert_train.data.read.rows import LeftOut
from modernbert_train.data.read.task_rows import table_rows
from modernbert_train.errors import DataError

RUSSIAN = "привет мир"


def source(path: Path, kind: str = "text", **keys: str) -> SourceConfig:
    return SourceConfig(kind=kind, path=str(path), **keys)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a text file among files that are not text."""
    folder = tmp_path / "text"
    (folder / ".venv").mkdir(parents=True)
    (folder / "a.txt").write_text("words of a text " * 4000)
    os.mkfifo(folder / "pipe.txt")
    (folder / "zero.txt").symlink_to("/dev/zero")
    (tmp_path / "secret.txt").write_text("not yours")
    (folder / "out.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "same.txt").symlink_to("a.txt")
    (folder / ".venv" / "b.txt").write_text("words of a program")
    (folder / "page.html").write_text("<p>words</p>" * 400)
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(b'{"text": "words of a row"}\n' * 900))
    (folder / "notes.gz").write_bytes(gzip.compress(b"words of a note " * 900))
    return folder


def test_a_folder_means_its_regular_files_and_names_the_others(folder: Path) -> None:
    """A pipe or /dev/zero never ends, and the target of a symlink may be private."""
    config = source(folder)
    assert [file.name for file in source_files("x", config)] == ["a.txt", "same.txt"]
    others = passed_over(PrepareConfig(sources={"x": config}, out="out"))["x"]  # type: ignore[call-arg]
    assert (others["hidden"], others["pipes or devices"], others["links to files elsewhere"]) == (1, 1, 2)


def test_pretrain_reads_no_file_twice_and_no_html_as_text(folder: Path) -> None:
    """If a file ended in a bare .gz, each .jsonl.gz also became a document of raw JSON."""
    found = look_at_text([str(folder)])
    files = [file for name, each in found.sources.items() for file in source_files(name, each)]
    assert sorted(file.name for file in files) == ["a.txt", "notes.gz", "rows.jsonl.gz", "same.txt"]
    assert {".html", "hidden", "pipes or devices", "links to files elsewhere"} <= {*found.passed_over}


def test_a_pipe_is_refused_by_every_verb(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each verb would wait for ever."""
    pipe = folder / "pipe.txt"
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match="pipes or devices are not read"):
        list(read_source("x", source(pipe), 1000))
    with pytest.raises(DataError, match="pipes or devices are not read"):
        look_at_text(["/dev/zero"])
    assert main(["embed", "model", str(tmp_path / "pipe.jsonl"), "--out", str(tmp_path / "v.npy")]) == 65
    assert "a pipe or a device and not a file" in capsys.readouterr().err
    with pytest.raises(ValueError, match="a pipe or a device and not a file"):
        list(table_rows(tmp_path / "pipe.jsonl", ["text"]))


def test_a_small_file_never_takes_gigabytes(tmp_path: Path) -> None:
    """A Parquet dictionary and a zstd frame encode 32 GB in kilobytes."""
    long = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 2000, pyarrow.int32()), ["b" * (16 << 20)])
    parquet.write_table(pyarrow.table({"text": long}), tmp_path / "a.parquet", compression="zstd")
    rows = (b'{"text": "' + b"b" * 20_000 + b'"}\n') * 1000
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(rows) * 20)
    assert all(file.stat().st_size < 100_000 for file in tmp_path.iterdir())
    for kind in ("parquet", "jsonl"):
        *_, last = read_source("x", source(tmp_path, kind), 1000)
        assert isinstance(last, LeftOut) and "unpacks to more than" in last.detail and last.rest
    with pytest.raises(ValueError, match="unpacks to more than"):
        sum(1 for _ in table_rows(tmp_path / "a.jsonl.zst", ["text"]))
    with pytest.raises(ValueError, match="line 1: text has 16,777,216 characters"):
        sum(1 for _ in table_rows(tmp_path / "a.parquet", ["text"]))


@pytest.mark.parametrize("kind", ["text", "jsonl", "csv"])
def test_a_named_encoding_applies_to_what_is_not_utf_8(tmp_path: Path, kind: str) -> None:
    """Otherwise no encoding fits a folder of both: each refused the files of the other and advised it."""
    head, tail = {"text": ("", ""), "jsonl": ('{"text": "', '"}\n'), "csv": ("text\n", "\n")}[kind]
    end = {"text": "txt"}.get(kind, kind)
    (tmp_path / f"1.{end}").write_bytes(f"{head}{RUSSIAN}{tail}".encode())
    (tmp_path / f"2.{end}").write_bytes(f"{head}{RUSSIAN}{tail}".encode("koi8-r"))
    found = list(read_source("x", source(tmp_path, kind, encoding="koi8_r"), 1000))
    assert [item.text for item in found if isinstance(item, Document)] == [RUSSIAN, RUSSIAN]
