"""Reading text: a broken reader means training on damaged text, on less text than expected, or never ends."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import re
import zlib
from pathlib import Path
from typing import Any, NoReturn

import datasets
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from data_prep.read.documents import Document, read_source
from data_prep.sample import look_at_text
from modernbert_train.__main__ import main
from modernbert_train.config.load import load_typed
from modernbert_train.config.tools.prepare import PrepareConfig, SourceConfig
from modernbert_train.data.read.find_files import passed_over, passed_over_lines, source_files
from modernbert_train.data.read.rows import LeftOut
from modernbert_train.data.read.task_rows import table_rows
from modernbert_train.errors import ConfigError, DataError
from tests.support.corpora import Command
from tests.support.tiny_run import TinyRun

LIMIT = 1000


def source(path: Path | str, kind: str = "text", **keys: str) -> SourceConfig:
    return SourceConfig(kind=kind, path=str(path), **keys)  # type: ignore[arg-type]


def read(**keys: str) -> list[Document | LeftOut]:
    return list(read_source("mine", source(**keys), LIMIT))


def texts_of(items: list[Document | LeftOut]) -> list[str]:
    return [item.text if isinstance(item, Document) else item.reason for item in items]


def texts_in(path: Path, kind: str, **keys: str) -> list[str]:
    return texts_of(read(kind=kind, path=str(path), **keys))


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


def refuse(path: object, *_: int) -> NoReturn:
    raise PermissionError(13, "Permission denied", str(path))


def test_permission_error_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of another user must not end a run of hours, nor be skipped silently."""
    (tmp_path / "1.txt").write_text("one")
    monkeypatch.setattr(os, "open", refuse)
    (item,) = read(kind="text", path=str(tmp_path))
    assert isinstance(item, LeftOut) and item.reason == "unreadable" and "Permission denied" in item.detail


def test_folder_that_cannot_be_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain globbing silently skips such a folder with all its files."""
    (tmp_path / "1.txt").write_text("one")
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


@pytest.mark.parametrize("kind", ["text", "jsonl", "csv"])
def test_every_usual_compression_is_read(tmp_path: Path, kind: str) -> None:
    """.bz2 and .xz were "not UTF-8"."""
    content = {"text": "one\n", "jsonl": '{"text": "one\\n"}\n', "csv": 'text\n"one\n"\n'}[kind].encode()
    compressions = {"bz2": bz2.compress, "xz": lzma.compress, "zstd": zstandard.compress, "gz": gzip.compress}
    for end, compress in compressions.items():
        data = compress(content)
        (tmp_path / f"a.{end}").write_bytes(data)
        assert texts_in(tmp_path / f"a.{end}", kind) == ["one\n"]
        (tmp_path / f"b.{end}").write_bytes(data[: len(data) // 2])
        assert texts_in(tmp_path / f"b.{end}", kind)[-1] == "unreadable"
    (tmp_path / "b.gz").write_bytes(b"\x1f\x8b\x08" + b"\0" * 7 + zlib.compress(content)[2:-8] + b"\xff" * 20)
    assert texts_in(tmp_path / "b.gz", kind)[-1] == "unreadable"  # zlib.error is not an OSError


@pytest.mark.runs
def test_files_that_no_pattern_takes_are_counted(
    command: Command, corpus: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of six spellings of JSONL one used to be read, and of 30 mixed files 8."""
    for name in ("a.TXT", "b.txt.gz", "c.md", "d.md", "e", ".hidden", "f.jsonl"):
        (corpus / name).write_text('{"text": "' + "some words " * 9 + '"}')
    assert command("sources.more.kind=jsonl", f"sources.more.path={corpus}", "max_left_out=1") == 0
    printed = capsys.readouterr()
    said = "sources.mine: 6 files of its folder are not read: "
    (shown,) = re.findall(f"{said}(.*)\\. To", printed.err)
    assert {*shown.split(", ")} == {"2 .md", "1 .TXT", "1 .txt.gz", "1 hidden", "1 without an ending"}
    assert (printed.err + printed.out).count("files of its folder are not read") == 1  # both sources use one folder
    report = json.loads((tmp_path / "out/prepare_report.json").read_text())
    assert report["not_read"]["mine"] == {".md": 2, ".TXT": 1, ".txt.gz": 1, "hidden": 1, "without an ending": 1}
    sources = {"a": SourceConfig(kind="text", path=str(corpus), glob="**/*.{txt,TXT,md}")}
    assert list(passed_over_lines(passed_over(PrepareConfig(out="out", sources=sources))))
    with pytest.raises(DataError, match=r"matches \*\.tex \(.*60 \.txt.* are there\)"):
        list(read_source("a", SourceConfig(kind="text", path=str(corpus), glob="*.tex"), 100))


def test_braces_in_a_pattern(tmp_path: Path) -> None:
    """Shells accept them, so users write them first."""
    for name in ("a.md", "b.txt", "c.rst", "deep/d.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    found = texts_in(tmp_path, "text", glob="{**/*.{md,txt},c.*}")
    assert found == ["a.md", "b.txt", "c.rst", "deep/d.md"]
    assert texts_in(tmp_path / "*.{md,rst}", "text") == ["a.md", "c.rst"]


def test_a_pattern_needs_no_quotes_within_quotes() -> None:
    """'sources.x.glob=**/*.md' was "not valid YAML", as an alias."""
    config = load_typed(PrepareConfig, [], ["out=x", "sources.x.kind=text", "sources.x.glob=**/*.md"])
    assert config.sources["x"].glob == "**/*.md"


def test_text_within_objects(tmp_path: Path) -> None:
    """`fields` accepted dots, `text_field` did not."""
    rows = [{"doc": {"text": "one"}}, {"doc": {}}, {"doc.text": "whole"}, {"other": 1}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert texts_in(tmp_path / "a.jsonl", "jsonl", text_field="doc.text") == ["one", "no_text", "whole", "no_text"]
    datasets.Dataset.from_dict({"doc": [{"text": "one", "n": 1}]}).to_parquet(str(tmp_path / "a.parquet"))
    assert texts_in(tmp_path / "a.parquet", "parquet", text_field="doc.text") == ["one"]


@pytest.mark.parametrize("content", ['[{"text": "a"}]', '[\n{"text": "a"}\n]', '{\n"text": "a"\n}'])
def test_an_array_of_json_says_how_it_becomes_jsonl(tmp_path: Path, content: str) -> None:
    """ "list, not an object" did not help."""
    (tmp_path / "a.json").write_text(content)
    first = next(iter(read_source("a", SourceConfig(kind="jsonl", path=str(tmp_path / "a.json")), 100)))
    assert isinstance(first, LeftOut) and "one object a line: jq -c" in first.detail


@pytest.mark.runs
def test_an_empty_validation_set_says_which_share_works(
    command: Command, corpus: Path, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Shares from 0.01 to 0.3 used to fail one after the other on eight files."""

    path = f"sources.mine.path={corpus / 'part0'}/00?.txt"
    assert command(path, "validation_share=0.001") == 65
    found = re.search(r"a validation_share from ([\d.]+) to ([\d.]+) gives both", capsys.readouterr().err)
    assert found is not None
    for share in found.groups():
        assert command(path, f"validation_share={share}", "tokenizer.vocab_size=320", "--overwrite") == 0
    assert command(path, f"validation_share={float(found[1]) - 0.001}", "--overwrite") == 65


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
