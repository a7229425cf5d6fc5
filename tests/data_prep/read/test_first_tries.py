"""Common first mistakes, and contents of real folders: unread files, other encodings, arrays of JSON, dots."""

# ruff: noqa: RUF001
from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
import zlib
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest
import zstandard

from data_prep.read.documents import Document, read_source
from modernbert_train.config.load import load_typed
from modernbert_train.config.tools.prepare import PrepareConfig, SourceConfig
from modernbert_train.data.read.encodings import guess
from modernbert_train.data.read.files import passed_over, passed_over_lines
from modernbert_train.data.read.rows import LeftOut
from modernbert_train.errors import DataError

Command = Callable[..., int]
POLISH = "Zażółć gęślą jaźń, powiedział król, który już od dawna był śpiący i głodny.\n"
CZECH = "Příliš žluťoučký kůň úpěl ďábelské ódy, když se večer vracel domů.\n".replace("ť", "t")  # 0x9d is undefined
HUNGARIAN = "Az őrült fűnyíró gyűlölte a törött űrhajót, és időnként hűvös esőről álmodott.\n"
TURKISH = "Şişli'deki küçük çocuğun ağabeyi dün akşam ığdır'dan geldi, şaşırdık.\n"
ROMANIAN = "Şi a plecat în ţară, fără să ştie că mâine va fi o zi însorită.\n"
RUSSIAN = "Dear Анна, пишу вам письмо.\n"
CHINESE = "The word 你好世界 means hello world, and so it is written here too.\n"
WESTERN = [
    "Où est le garçon qui a mangé l\u2019œuf à la coque ? Il n'est pas là.\n",
    "Äpfel, Öl und süße Straßen; ein Café – „schön“ – kostet 5 €.\n",
    "¿Dónde está el niño? ¡Aquí! El pingüino comió piña.\n",
    "Não há coração que não bata à força, português é fácil.\n",
    "Blåbærsyltetøy på Ærø, sånn er det. Århus.\n",
    "Það er ekki ástæða til þess að örvænta, sagði hún.\n",
    "Hyvää päivää, mitä kuuluu? Yö on pitkä.\n",
    "Perché no? È così, città e università.\n",
    "An area of 5 km² (3 m³), café naïve® ± 2 µm at 20 °C; note¹.\n",
]


def read(file: Path, kind: str, encoding: str = "utf-8", text_field: str | None = None) -> list[str]:
    source = SourceConfig(kind=kind, path=str(file), encoding=encoding, text_field=text_field)  # type: ignore[arg-type]
    items = read_source("a", source, 10_000)
    return [item.text if isinstance(item, Document) else item.reason for item in items]


@pytest.mark.parametrize("text", WESTERN)
def test_auto_still_reads_western_text(text: str) -> None:
    """Otherwise it would be left out, and a spec that is valid today would fail."""
    assert guess(text.encode("cp1252")) == "cp1252"
    assert guess("".join(WESTERN).encode("cp1252")) == "cp1252"


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (POLISH, "cp1250"), (POLISH, "iso8859-2"), (CZECH, "cp1250"), (HUNGARIAN, "cp1250"), (ROMANIAN, "cp1250"),
        (TURKISH, "cp1254"), (RUSSIAN, "cp1251"), (RUSSIAN, "koi8-r"), (CHINESE, "gb18030"), (CHINESE, "big5"),
    ],
)  # fmt: skip
def test_auto_makes_no_mojibake_of_other_languages(tmp_path: Path, text: str, encoding: str) -> None:
    """Polish, Czech, Turkish, Hungarian and Romanian JSONL used to be read as Windows-1252 and trained on."""
    (tmp_path / "a.jsonl").write_bytes(json.dumps({"text": text}, ensure_ascii=False).encode(encoding))
    assert read(tmp_path / "a.jsonl", "jsonl", "auto") == ["not_utf8"]
    assert read(tmp_path / "a.jsonl", "jsonl", encoding) == [text]
    assert read(tmp_path / "a.jsonl", "csv", encoding, text_field="x") == ["no_text"]


def test_a_named_encoding_applies_to_what_is_utf_8_by_chance(tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_bytes("联通".encode("gb18030"))
    assert read(tmp_path / "c.txt", "text", "gb18030") == ["联通"]


@pytest.mark.parametrize("encoding", ["utf-32", "utf-16-be", "utf-8-sig"])
def test_lines_are_found_in_any_encoding(tmp_path: Path, encoding: str) -> None:
    """Bytes of a newline within other characters would cut lines to pieces."""
    lines = [json.dumps({"text": f"{text}ਊ"}, ensure_ascii=False) for text in (POLISH, CHINESE)]
    (tmp_path / "a.jsonl").write_bytes("\n".join(lines).encode(encoding))
    assert read(tmp_path / "a.jsonl", "jsonl", encoding) == [f"{POLISH}ਊ", f"{CHINESE}ਊ"]


@pytest.mark.parametrize("kind", ["text", "jsonl", "csv"])
def test_every_usual_compression_is_read(tmp_path: Path, kind: str) -> None:
    """.bz2 and .xz were "not UTF-8"."""
    content = {"text": "one\n", "jsonl": '{"text": "one\\n"}\n', "csv": 'text\n"one\n"\n'}[kind].encode()
    compressions = {"bz2": bz2.compress, "xz": lzma.compress, "zstd": zstandard.compress, "gz": gzip.compress}
    for end, compress in compressions.items():
        data = compress(content)
        (tmp_path / f"a.{end}").write_bytes(data)
        assert read(tmp_path / f"a.{end}", kind) == ["one\n"]
        (tmp_path / f"b.{end}").write_bytes(data[: len(data) // 2])
        assert read(tmp_path / f"b.{end}", kind)[-1] == "unreadable"
    (tmp_path / "b.gz").write_bytes(b"\x1f\x8b\x08" + b"\0" * 7 + zlib.compress(content)[2:-8] + b"\xff" * 20)
    assert read(tmp_path / "b.gz", kind)[-1] == "unreadable"  # zlib.error is not an OSError


@pytest.mark.runs
def test_files_that_no_pattern_takes_are_counted(
    command: Command, corpus: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of six spellings of JSONL one used to be read, and of 30 mixed files 8."""
    for name in ("a.TXT", "b.txt.gz", "c.md", "d.md", "e", ".hidden", "f.jsonl"):
        (corpus / name).write_text('{"text": "' + "some words " * 9 + '"}')
    assert command("sources.more.kind=jsonl", f"sources.more.path={corpus}", "max_left_out=1") == 0
    printed = capsys.readouterr()
    said = "sources.mine: 6 files of its folder are not read: 2 .md, 1 .TXT, 1 .txt.gz, 1 hidden, 1 without an ending."
    shown = {
        frozenset(line.partition("not read: ")[2].split(". To")[0].split(", ")) for line in printed.err.split("\n")
    }
    assert frozenset(said.partition("not read: ")[2].rstrip(".").split(", ")) in shown
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
    source = SourceConfig(kind="text", path=str(tmp_path), glob="{**/*.{md,txt},c.*}")
    assert [item.text for item in read_source("a", source, 100) if isinstance(item, Document)] == [
        "a.md", "b.txt", "c.rst", "deep/d.md",
    ]  # fmt: skip
    assert read(tmp_path / "*.{md,rst}", "text") == ["a.md", "c.rst"]


def test_a_pattern_needs_no_quotes_within_quotes() -> None:
    """'sources.x.glob=**/*.md' was "not valid YAML", as an alias."""
    config = load_typed(PrepareConfig, [], ["out=x", "sources.x.kind=text", "sources.x.glob=**/*.md"])
    assert config.sources["x"].glob == "**/*.md"


def test_text_within_objects(tmp_path: Path) -> None:
    """`fields` accepted dots, `text_field` did not."""
    rows = [{"doc": {"text": "one"}}, {"doc": {}}, {"doc.text": "whole"}, {"other": 1}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read(tmp_path / "a.jsonl", "jsonl", text_field="doc.text") == ["one", "no_text", "whole", "no_text"]
    datasets.Dataset.from_dict({"doc": [{"text": "one", "n": 1}]}).to_parquet(str(tmp_path / "a.parquet"))
    assert read(tmp_path / "a.parquet", "parquet", text_field="doc.text") == ["one"]


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
