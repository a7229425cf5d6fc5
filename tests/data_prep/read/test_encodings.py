"""Text that is not UTF-8: read in the configured encoding, counted, and never guessed from damaged bytes.

If this breaks, half of a European corpus is left out, or mojibake is trained on.
"""

# ruff: noqa: RUF001
from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from data_prep.prepare import main
from data_prep.read import documents
from data_prep.read.documents import Document, read_source
from data_prep.report import fingerprint
from data_prep.tasks.work import cut
from modernbert_train.config.tools.prepare import PrepareConfig, SourceConfig
from modernbert_train.data.read.encodings import guess
from modernbert_train.data.read.rows import LeftOut
from modernbert_train.data.read.sources import whole_spans

FRENCH = "Où est le garçon qui a mangé l\u2019œuf à la coque ? Il n'est pas là.\n"
RUSSIAN = "Где мальчик, который съел яйцо? Его здесь нет.\n"
JAPANESE = "卵を食べた男の子はどこですか。ここにはいません。\n"
GREETING = "привет мир"
POLISH = "Zażółć gęślą jaźń, powiedział król, który już od dawna był śpiący i głodny.\n"
CZECH = "Příliš žluťoučký kůň úpěl ďábelské ódy, když se večer vracel domů.\n".replace("ť", "t")  # 0x9d is undefined
HUNGARIAN = "Az őrült fűnyíró gyűlölte a törött űrhajót, és időnként hűvös esőről álmodott.\n"
TURKISH = "Şişli'deki küçük çocuğun ağabeyi dün akşam ığdır'dan geldi, şaşırdık.\n"
ROMANIAN = "Şi a plecat în ţară, fără să ştie că mâine va fi o zi însorită.\n"
LETTER = "Dear Анна, пишу вам письмо.\n"
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


def read(encoding: str, **keys: str) -> list[Document | LeftOut]:
    source = SourceConfig(**keys, encoding=encoding)  # type: ignore[arg-type]
    return list(read_source("mine", source, 1 << 20))


def found(items: list[Document | LeftOut]) -> list[tuple[str, str | None]]:
    return [(item.text, item.altered) if isinstance(item, Document) else (item.reason, None) for item in items]


def texts_in(path: Path, encoding: str, *, kind: str = "jsonl", **keys: str) -> list[str]:
    return [text for text, _ in found(read(encoding, kind=kind, path=str(path), **keys))]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"plain", "utf-8"),
        (b"", "utf-8"),
        (FRENCH.encode(), "utf-8"),
        (RUSSIAN.encode(), "utf-8"),
        (b"\xef\xbb\xbf" + FRENCH.encode(), "utf-8"),
        (FRENCH.encode("cp1252"), "cp1252"),
        (FRENCH.replace("\u2019", "'").replace("œ", "oe").encode("latin-1"), "cp1252"),
        (FRENCH.encode("utf-16"), "utf-16-le"),
        (b"\xfe\xff" + JAPANESE.encode("utf-16-be"), "utf-16-be"),
        (FRENCH.encode("utf-16-le"), "utf-16-le"),
        (FRENCH.encode("utf-16-be"), "utf-16-be"),
        *((text.encode("cp1252"), "cp1252") for text in (*WESTERN, "".join(WESTERN))),
        # cases that must not be guessed
        (RUSSIAN.encode("koi8-r"), None),
        (RUSSIAN.encode("cp1251"), None),
        (JAPANESE.encode("shift-jis"), None),
        (FRENCH.encode()[:-1] + b"\xe9\n", None),  # UTF-8 with one bad byte
        (FRENCH.encode() + FRENCH.encode("cp1252")[:20] + b"\xc3", None),
        (bytes(range(1, 256)) * 4, None),
        (b"a\0b and zeros here and there\0", None),
        (gzip.compress(FRENCH.encode() * 9), None),
    ],
)
def test_what_bytes_are_taken_for(raw: bytes, expected: str | None) -> None:
    """Only bytes that look like text of western languages are decoded as such."""
    assert guess(raw) == expected


def test_no_random_bytes_are_text() -> None:
    draw = np.random.default_rng(3)
    assert {guess(draw.bytes(int(draw.integers(40, 4000)))) for _ in range(200)} == {None}


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (POLISH, "cp1250"), (POLISH, "iso8859-2"), (CZECH, "cp1250"), (HUNGARIAN, "cp1250"), (ROMANIAN, "cp1250"),
        (TURKISH, "cp1254"), (LETTER, "cp1251"), (LETTER, "koi8-r"), (CHINESE, "gb18030"), (CHINESE, "big5"),
    ],
)  # fmt: skip
def test_auto_makes_no_mojibake_of_other_languages(tmp_path: Path, text: str, encoding: str) -> None:
    """Polish, Czech, Turkish, Hungarian and Romanian JSONL used to be read as Windows-1252 and trained on."""
    (tmp_path / "a.jsonl").write_bytes(json.dumps({"text": text}, ensure_ascii=False).encode(encoding))
    assert texts_in(tmp_path / "a.jsonl", "auto") == ["not_utf8"]
    assert texts_in(tmp_path / "a.jsonl", encoding) == [text]
    assert texts_in(tmp_path / "a.jsonl", encoding, kind="csv", text_field="x") == ["no_text"]


def test_a_named_encoding_applies_to_what_is_utf_8_by_chance(tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_bytes("联通".encode("gb18030"))
    assert texts_in(tmp_path / "c.txt", "gb18030", kind="text") == ["联通"]


@pytest.mark.parametrize("encoding", ["utf-32", "utf-16-be", "utf-8-sig"])
def test_lines_are_found_in_any_encoding(tmp_path: Path, encoding: str) -> None:
    """Bytes of a newline within other characters would cut lines to pieces."""
    lines = [json.dumps({"text": f"{text}ਊ"}, ensure_ascii=False) for text in (POLISH, CHINESE)]
    (tmp_path / "a.jsonl").write_bytes("\n".join(lines).encode(encoding))
    assert texts_in(tmp_path / "a.jsonl", encoding) == [f"{POLISH}ਊ", f"{CHINESE}ਊ"]


@pytest.mark.parametrize("kind", ["text", "jsonl", "csv"])
def test_a_named_encoding_applies_to_what_is_not_utf_8(tmp_path: Path, kind: str) -> None:
    """Otherwise no encoding fits a folder of both: each refused the files of the other and advised it."""
    head, tail = {"text": ("", ""), "jsonl": ('{"text": "', '"}\n'), "csv": ("text\n", "\n")}[kind]
    end = {"text": "txt"}.get(kind, kind)
    (tmp_path / f"1.{end}").write_bytes(f"{head}{GREETING}{tail}".encode())
    (tmp_path / f"2.{end}").write_bytes(f"{head}{GREETING}{tail}".encode("koi8-r"))
    assert texts_in(tmp_path, "koi8_r", kind=kind) == [GREETING, GREETING]


def test_files_of_text(tmp_path: Path) -> None:
    """By default other encodings are left out, as before; each is read if it is configured."""
    (tmp_path / "1.txt").write_bytes(FRENCH.encode("cp1252"))
    (tmp_path / "2.txt").write_bytes(FRENCH.encode("utf-16"))
    (tmp_path / "3.txt").write_bytes(FRENCH.encode("utf-8-sig"))
    (tmp_path / "4.txt").write_bytes(RUSSIAN.encode("koi8-r"))
    path = str(tmp_path)
    assert found(read("utf-8", kind="text", path=path)) == [
        ("not_utf8", None), ("nul_byte", None), (FRENCH, "byte_order_mark"), ("not_utf8", None),
    ]  # fmt: skip
    assert found(read("auto", kind="text", path=path)) == [
        (FRENCH, "decoded_cp1252"), (FRENCH, "decoded_utf_16"), (FRENCH, "byte_order_mark"), ("not_utf8", None),
    ]  # fmt: skip
    assert found(read("cp1252", kind="text", path=f"{path}/1.txt")) == [(FRENCH, "decoded_cp1252")]
    assert found(read("utf-16", kind="text", path=f"{path}/2.txt")) == [(FRENCH, "decoded_utf_16")]
    assert found(read("latin-1", kind="text", path=f"{path}/1.txt"))[0][1] == "decoded_latin_1"
    assert found(read("utf-16", kind="text", path=f"{path}/1.txt")) == [("not_utf_16", None)]
    (tmp_path / "5.txt").write_bytes(b"\x81")
    assert found(read("cp1252", kind="text", path=f"{path}/5.txt")) == [("not_cp1252", None)]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_lines_of_jsonl(tmp_path: Path, suffix: str) -> None:
    """UTF-16 by the file's byte order mark, others line by line: programs may have appended to another's file."""
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix]
    lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in (FRENCH, "b", FRENCH)]
    mixed = lines[0].encode("cp1252") + lines[1].encode() + lines[2].encode()
    (tmp_path / f"1.jsonl{suffix}").write_bytes(pack(mixed))
    (tmp_path / f"2.jsonl{suffix}").write_bytes(pack("".join(lines).encode("utf-16")))
    assert found(read("auto", kind="jsonl", path=str(tmp_path))) == [
        (FRENCH, "decoded_cp1252"), ("b", None), (FRENCH, None),
        (FRENCH, "decoded_utf_16"), ("b", "decoded_utf_16"), (FRENCH, "decoded_utf_16"),
    ]  # fmt: skip
    (tmp_path / f"3.jsonl{suffix}").write_bytes(pack("".join(lines).encode("utf-16")[:-1]))
    assert found(read("utf-16", kind="jsonl", path=f"{tmp_path}/3.jsonl{suffix}"))[-1] == ("unreadable", None)


def test_jsonl_of_utf_16_is_not_cut_and_others_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the middle of such a file every other byte would be a line."""
    monkeypatch.setattr("data_prep.tasks.work._SMALL_TASK_BYTES", 1 << 10)
    line = json.dumps({"text": FRENCH}, ensure_ascii=False) + "\n"
    for number, encoding in enumerate(("utf-16", "cp1252", "utf-8")):
        (tmp_path / f"{number}.jsonl").write_bytes((line * 200).encode(encoding))
    for encoding, whole in (("utf-16", {0, 1, 2}), ("utf-8", set()), ("auto", {0})):
        source = SourceConfig(kind="jsonl", path=str(tmp_path), encoding=encoding)
        config = PrepareConfig(out="x", sources={"a": source}, task_bytes=1 << 12)
        spans = [span for task in cut(config) for span in task]
        parts = Counter(int(Path(str(span.path)).stem) for span in spans)
        assert {number for number, count in parts.items() if count == 1} == whole and len(parts) == 3, encoding
    texts = [item for span in spans for item in documents.read_span(span, source, 1 << 20)]
    assert len(texts) == 600 and all(isinstance(item, Document) and item.text == FRENCH for item in texts)


@pytest.mark.runs
@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("encoding", ["cp1252", "utf-16", "utf-8"])
def test_rows_of_csv(tmp_path: Path, encoding: str, suffix: str) -> None:
    content = f'n,text\n1,"{FRENCH}"\n2,last\n'.encode(encoding)
    (tmp_path / f"a.csv{suffix}").write_bytes(gzip.compress(content) if suffix else content)
    word = None if encoding == "utf-8" else f"decoded_{encoding.replace('-', '_')}"
    for asked in ("auto", encoding):
        assert found(read(asked, kind="csv", path=str(tmp_path))) == [(FRENCH, word), ("last", word)]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_archives_of_several_parts_are_read_to_the_end(tmp_path: Path, suffix: str) -> None:
    """pigz, pzstd, bgzip and `cat` write them; with empty, skippable and padding parts among them."""
    words = ["one", "two", "three"]
    lines = [json.dumps({"text": word}).encode() + b"\n" for word in words]
    if suffix == ".gz":
        packed = gzip.compress(lines[0]) + gzip.compress(b"") + gzip.compress(lines[1][:5])
        packed += gzip.compress(lines[1][5:]) + gzip.compress(lines[2]) + b"\0" * 512
    else:
        skippable = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"pzst"
        packed = skippable + zstandard.compress(lines[0]) + skippable + zstandard.compress(b"")
        packed += zstandard.compress(lines[1][:5]) + zstandard.compress(lines[1][5:]) + zstandard.compress(lines[2])
        packed += skippable
    (tmp_path / f"a.jsonl{suffix}").write_bytes(packed)
    assert texts_in(tmp_path, "utf-8") == words


def test_new_keys_leave_fingerprints_of_before_alone(tmp_path: Path) -> None:
    """A dataset prepared before there were the keys is complete, and not refused as another spec's."""
    (tmp_path / "a.jsonl").write_text("{}")
    source: dict[str, Any] = {"kind": "jsonl", "path": str(tmp_path)}
    plain = fingerprint(PrepareConfig(out="x", sources={"a": SourceConfig(**source)}))["spec"]
    assert plain["sources"]["a"].keys() == {"kind", "path", "glob", "text_field", "subset", "split"}
    assert not {"decontaminate", "overlap_words"} & plain.keys()
    said = {"encoding": "auto", "words_field": "words"}
    asked = fingerprint(PrepareConfig(out="x", sources={"a": SourceConfig(**source, **said)}))["spec"]
    assert asked["sources"]["a"].items() >= said.items()


@pytest.mark.runs
def test_what_was_assumed_is_counted_and_the_rest_says_what_to_ask(
    tmp_path: Path, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i, text in enumerate(texts):
        (folder / f"{i:03}.txt").write_bytes((text + "é").encode(["utf-8", "latin-1", "utf-16"][i % 3]))
    words = [f"sources.mine={{kind: text, path: {folder}}}", "tokenizer.vocab_size=384", "validation_share=0.2"]
    assert main([f"out={tmp_path}/plain", *words]) == 65
    said = capsys.readouterr().err
    assert "not_utf8 20" in said and "nul_byte 20" in said and "Set sources.mine.encoding=auto" in said
    assert "Encodings of its files: utf-8 in 20, cp1252 in 20, utf-16 in 20." in said
    assert main([f"out={tmp_path}/auto", *words, "sources.mine.encoding=auto"]) == 0
    assert "altered: 20 by decoded_cp1252, 20 by decoded_utf_16" in capsys.readouterr().out
    report = json.loads((tmp_path / "auto/prepare_report.json").read_text())
    assert report["sources"]["mine"]["altered"] == {"decoded_cp1252": 20, "decoded_utf_16": 20}


@pytest.mark.runs
def test_text_in_mds_shards(tmp_path: Path) -> None:
    """llm-foundry's and AnswerDotAI's text; each shard once, also if it is both unpacked and in an archive."""
    from tests.support.layouts import unpack, write_mds

    samples = [{"text": f"{FRENCH}{i}", "id": str(i)} for i in range(60)]
    columns = {"id": "str", "text": "str", "n": "int"}
    rows = [each | {"n": 3} for each in samples]
    write_mds(tmp_path / "a", columns, rows[:30], compression="zstd")
    write_mds(tmp_path / "b", columns, rows[30:])
    packed = sorted((tmp_path / "a").glob("*.zstd"))
    unpack(packed[0])
    items = read("utf-8", kind="mds", path=str(tmp_path))
    assert [item.text for item in items if isinstance(item, Document)] == [each["text"] for each in samples]
    assert len({item.id for item in items}) == 60 and len(packed) > 1
    (item, *_) = read("utf-8", kind="mds", path=str(tmp_path / "b"), text_field="body")
    assert isinstance(item, LeftOut) and "no column 'body' among 'id (str)', 'n (int)', 'text (str)'" in item.detail
    packed[1].write_bytes(packed[1].read_bytes()[:-20])
    left = [item for item in read("utf-8", kind="mds", path=str(tmp_path / "a")) if isinstance(item, LeftOut)]
    assert [item.reason for item in left] == ["unreadable"]
    assert len(list(whole_spans("mine", SourceConfig(kind="mds", path=str(tmp_path / "a"))))) == len(packed)
