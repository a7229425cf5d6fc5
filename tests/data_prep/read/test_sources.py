"""Reading text: a broken reader means training on damaged text, or on less text than expected."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from data_prep.read.documents import Document, read_source
from modernbert_train.__main__ import main
from modernbert_train.config.tools.prepare import SourceConfig
from modernbert_train.data.read.rows import LeftOut
from modernbert_train.errors import ConfigError, DataError
from tests.support.tiny_run import TinyRun

LIMIT = 1000


def read(**keys: str) -> list[Document | LeftOut]:
    return list(read_source("mine", SourceConfig(**keys), LIMIT))  # type: ignore[arg-type]


def texts_of(items: list[Document | LeftOut]) -> list[str]:
    return [item.text if isinstance(item, Document) else item.reason for item in items]


def test_text_files_come_sorted_and_whole(tmp_path: Path) -> None:
    """Files in another order, or with changed newlines or byte order marks, would make other shards."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "1.txt").write_bytes("\ufeffz\r\nz".encode())
    (tmp_path / "a.txt").write_bytes(b"a\n")
    (tmp_path / "note.md").write_bytes(b"not asked for")
    (tmp_path / "folder.txt").mkdir()
    assert texts_of(read(kind="text", path=str(tmp_path))) == ["a\n", "z\r\nz"]
    assert texts_of(read(kind="text", path=str(tmp_path), glob="*.md")) == ["not asked for"]
    assert texts_of(read(kind="text", path=str(tmp_path / "?.txt"))) == ["a\n"]
    assert texts_of(read(kind="text", path=str(tmp_path / "a.txt"))) == ["a\n"]


def test_permission_error_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of another user must not end a run of hours, nor be skipped silently."""
    (tmp_path / "1.txt").write_text("one")

    def refuse(path: Path, *_: int) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    (item,) = read(kind="text", path=str(tmp_path))
    assert isinstance(item, LeftOut) and item.reason == "unreadable" and "Permission denied" in item.detail


def test_folder_that_cannot_be_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain globbing silently skips such a folder with all its files."""
    (tmp_path / "1.txt").write_text("one")

    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(DataError, match=r"Permission denied\)\. Make the folder readable"):
        read(kind="text", path=str(tmp_path))


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "csv"])
def test_empty_folder_names_path_and_pattern(tmp_path: Path, kind: str) -> None:
    """A typo in a path must not make an empty dataset."""
    with pytest.raises(DataError, match=rf"no file in {tmp_path} matches \*\*/\*\..*sources\.mine\.glob"):
        read(kind=kind, path=str(tmp_path))
    with pytest.raises(DataError, match=r"no such file or folder\. Correct the path"):
        read(kind=kind, path=str(tmp_path / "gone"))


@pytest.mark.parametrize(
    ("glob", "why"),
    [
        ("**.txt", "must be alone between slashes"),
        ("a**/*.txt", "must be alone between slashes"),
        ("/tmp/*.txt", "it begins with /"),
        (".", "it names no file"),
    ],
)
def test_glob_that_is_no_pattern(tmp_path: Path, glob: str, why: str) -> None:
    """**.txt is a common first try. Python 3.13 treats it as *.txt, which misses all files in folders."""
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ConfigError, match=rf"sources\.mine: .* is not a pattern .*{why}.*Write one like \*\*/\*\.txt"):
        read(kind="text", path=str(tmp_path), glob=glob)


@pytest.mark.parametrize(
    ("glob", "texts"),
    [
        ("*", ["a"]),
        ("**", ["a", "c", "d"]),  # until Python 3.12 Path.glob returns folders only
        ("**/*", ["a", "c", "d"]),
        ("**/**/d", ["d"]),
        ("in/**/[c-d]", ["c", "d"]),
        ("in/*/d", ["d"]),
        ("link/*", ["c"]),
        ("in/.*", [".b"]),
        ("l*/deep/*", ["d"]),  # **/* skips the symlink: one that leads up would be followed for ever
        ("in/deep/../c", ["c"]),
        ("gone", ["unreadable"]),  # a broken symlink; until 3.12 it is missed if it is named in full
    ],
)
def test_a_pattern_means_the_same_on_every_python(tmp_path: Path, glob: str, texts: list[str]) -> None:
    """Otherwise the same YAML makes another data set on another machine."""
    for file in ("a", "in/.b", "in/c", "in/deep/d"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(Path(file).name)
    (tmp_path / "link").symlink_to("in")
    if "unreadable" in texts:
        (tmp_path / "gone").symlink_to("nowhere")
    assert texts_of(read(kind="text", path=str(tmp_path), glob=glob)) == texts
    if glob != "**":
        assert texts_of(read(kind="text", path=f"{tmp_path}/{glob}")) == texts


def test_csv_is_text_whatever_it_looks_like(tmp_path: Path) -> None:
    """Readers that guess types turn 007 into 7 and NA into a missing value."""
    (tmp_path / "a.csv").write_text('n,text\n1,"two\nlines, one cell"\n2,007\n3,NA\n4,\n')
    assert texts_of(read(kind="csv", path=str(tmp_path))) == ["two\nlines, one cell", "007", "NA", ""]


def test_a_parquet_row_that_is_not_utf_8_costs_a_row(tmp_path: Path, tiny_run: TinyRun, capsys: Any) -> None:
    """Arrow does not check texts on writing; one bad text cost the file and its thousand others."""
    texts = pyarrow.array([b"one", b"caf\xe9", *(b"text %d" % i for i in range(100))], pyarrow.binary())
    column = pyarrow.Array.from_buffers(pyarrow.string(), len(texts), texts.buffers())
    labels = pyarrow.array([i % 2 for i in range(len(texts))])
    parquet.write_table(pyarrow.table({"text": column, "label": labels}), tmp_path / "a.parquet")
    one, bad, *others = read(kind="parquet", path=str(tmp_path / "a.parquet"))
    assert isinstance(bad, LeftOut) and bad.id.endswith("a.parquet:2") and not bad.rest
    assert bad.detail == "not UTF-8: byte 0xe9 at byte 3 of a text"
    assert texts_of([one, *others]) == ["one", *(f"text {i}" for i in range(100))]
    probe = json.dumps({"name": "probe", "train": str(tmp_path / "a.parquet")})
    assert main(["check", *tiny_run(f"evals.x={probe}")]) == 65
    assert "line 2: not UTF-8: byte 0xe9 at byte 3 of a text. Correct it" in capsys.readouterr().err


def test_damaged_csv_and_parquet_are_counted(tmp_path: Path) -> None:
    """The rows after the damage are lost, and the report must say so."""
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "a.csv").write_bytes(b'text\n"never closed\n')
    for kind in ("csv", "parquet"):
        (item,) = read(kind=kind, path=str(tmp_path))
        assert isinstance(item, LeftOut) and item.reason == "unreadable" and item.id.startswith("all of ")


def test_hub_layout_on_disk(tmp_path: Path) -> None:
    """A downloaded dataset must train without a network; a wrong split is an error under any on_error."""
    (tmp_path / "train.jsonl").write_text('{"body": "one"}\n{"body": null}\n')
    assert texts_of(read(kind="hub", path=str(tmp_path), text_field="body")) == ["one", "no_text"]
    with pytest.raises(DataError, match=r"sources\.mine\.path=.*split validation.*Correct path, subset and split"):
        read(kind="hub", path=str(tmp_path), split="validation")


@pytest.mark.runs
def test_standard_library_has_no_tests_and_no_packages() -> None:
    """Third-party packages would make the quickstart's data depend on the installation."""
    items = list(read_source("std", SourceConfig(kind="python_stdlib"), 5_000_000))
    ids = [item.id for item in items]
    assert any(id.endswith("json/decoder.py") for id in ids) and "pydoc_data.topics:if" in ids
    assert not any(part in id for id in ids for part in ("site-packages", "/test/", "/tests/", "topics.py"))
    assert len(ids) > 500


def test_hidden_files_and_folders_are_read_only_where_a_pattern_names_them(tmp_path: Path) -> None:
    """.venv, .git and .ipynb_checkpoints contain other people's text, and passwords."""
    for name in ("a.txt", ".git/config.txt", ".venv/lib/b.txt", "c/._d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts_of(read(kind="text", path=str(tmp_path))) == ["a.txt"]
    assert texts_of(read(kind="text", path=str(tmp_path), glob="**/*")) == ["a.txt"]
    assert texts_of(read(kind="text", path=str(tmp_path), glob=".venv/**/*.txt")) == [".venv/lib/b.txt"]
    assert texts_of(read(kind="text", path=str(tmp_path), glob="c/.*")) == ["c/._d.txt"]


def test_a_long_window_of_zstd_is_read(tmp_path: Path) -> None:
    """As `zstd --long=31` writes it; Pushshift's archives used to be lost as damaged."""
    settings = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=settings)
    with (tmp_path / "a.jsonl.zst").open("wb") as file, compressor.stream_writer(file) as packed:
        packed.write(b'{"text": "one"}\n{"text": "two"}\n')
    assert texts_of(read(kind="jsonl", path=str(tmp_path))) == ["one", "two"]


def test_a_dataset_that_was_saved_to_disk_is_read(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["one", "two"]}).save_to_disk(tmp_path / "saved")
    assert texts_of(read(kind="hub", path=str(tmp_path / "saved"))) == ["one", "two"]
    with pytest.raises(DataError, match="neither subset nor split. Leave both out"):
        read(kind="hub", path=str(tmp_path / "saved"), split="test")
