"""FASTA. If this breaks, a model of proteins is trained on headers, on half of a chromosome, or on a table."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from data_prep.prepare import main
from data_prep.read.documents import Document, read_span
from data_prep.tokenizer import main as tokenizer_main
from modernbert_train.config.tools.prepare import SourceConfig
from modernbert_train.data.read.rows import LeftOut, Span
from tests.support.corpora import report_of, tokens_of

PROTEINS = ["MKVLAAGIVGLLLAQWERTY", "MSTNPKPQRKTKRNTNRRPQ", "MGSSHHHHHHSSGLVPRGSH", "MAHHHHHHVGTGSNDDDDKS"]


def prepare(out: Path, source: Path, tokenizer: Path, *words: str) -> int:
    usual = [f"out={out}", "sources.x.kind=fasta", f"sources.x.path={source}", f"tokenizer.path={tokenizer}"]
    return main([*usual, "validation_share=0", *words])


def read_all(file: Path, begin: int = 0, end: int | None = None, **keys: int) -> list[Document | LeftOut]:
    span = Span("x", str(file), begin, end)
    return list(read_span(span, SourceConfig(kind="fasta", path=str(file), **keys), 100))  # type: ignore[arg-type]


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    assert tokenizer_main(["letters", str(tmp_path / "letters"), "--alphabet", "protein"]) == 0
    return tmp_path / "letters"


@pytest.mark.runs
def test_records_of_all_files_become_documents_of_letters(letters: Path, tmp_path: Path, capsys: Any) -> None:
    """A folder as UniProt and Ensembl give it, packed or not: lines joined, headers dropped, empty records counted."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.fasta").write_text(f"\n>sp|P1|A first OS=Homo\n{PROTEINS[0][:7]}\r\n{PROTEINS[0][7:]}\n\n>empty\n")
    (folder / "b.fa.gz").write_bytes(gzip.compress(f">two\n{PROTEINS[1][:9].lower()} {PROTEINS[1][9:]}".encode()))
    (folder / "c.faa").write_bytes(b"\xef\xbb\xbf>three\n" + PROTEINS[2].encode() + b"\n>odd\nMK1#L\n")
    (folder / "d.fna.zst").write_bytes(zstandard.compress(f">four\n{PROTEINS[3]}\n".encode()))
    out = tmp_path / "out"
    assert prepare(out, folder, letters, "sources.x.glob=**/*", "max_left_out=0.2") == 0
    tokenizer = Tokenizer.from_file(str(out / "tokenizer" / "tokenizer.json"))
    texts = [tokenizer.decode(ids) for ids in tokens_of(out / "train")]
    assert texts == [*PROTEINS[:3], "MKL", PROTEINS[3]], "lower case is read as upper case"
    report = report_of(out)
    assert report["dropped"] == {"no_sequence": 1}
    assert report["first_dropped"]["no_sequence"] == [f"{folder}/a.fasta: >empty: a record without letters"]
    assert report["altered"] == {"unknown_tokens": 1}
    assert "1 by unknown_tokens" in capsys.readouterr().out


@pytest.mark.runs
def test_what_is_no_fasta_ends_the_command_with_the_file(letters: Path, tmp_path: Path, capsys: Any) -> None:
    """A table read as sequences would train a model of tabs."""
    (tmp_path / "a.fasta").write_text("id\tsequence\n1\tMKV\n")
    assert prepare(tmp_path / "out", tmp_path / "a.fasta", letters) == 65
    said = capsys.readouterr().err
    assert "a.fasta: no FASTA: it begins with b'id\\tsequence\\n'" in said
    assert "not with >; correct the kind, or the file" in said
    (tmp_path / "b.fasta").write_text("\n")
    assert prepare(tmp_path / "out", tmp_path / "b.fasta", letters) == 65
    assert prepare(tmp_path / "out", tmp_path / "b.fasta", letters, "sources.x.text_field=a") == 78


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("ACGT\n", max_size=12), min_size=1, max_size=8), st.data())
def test_a_file_cut_at_any_bytes_is_read_once(
    tmp_path_factory: pytest.TempPathFactory, records: list[str], data: st.DataObject
) -> None:
    """A genome of 100 GB is read by many tasks: a record on a boundary belongs to one of them, whole."""
    file = tmp_path_factory.mktemp("cut") / "a.fasta"
    file.write_text("".join(f">{number}\n{record}\n" for number, record in enumerate(records)))
    size = file.stat().st_size
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=5)))
    parts = [read_all(file, begin, end) for begin, end in itertools.pairwise([0, *cuts, size]) if begin < end]
    assert [item for part in parts for item in part] == read_all(file)
    assert len(read_all(file)) == len(records)


def test_a_chromosome_is_cut_or_left_out_but_never_held(tmp_path: Path) -> None:
    """It may be one line of 250 million letters, and a document takes 200 bytes of memory a letter."""
    file = tmp_path / "a.fna.gz"
    file.write_bytes(gzip.compress(b">1 chromosome\n" + b"ACGTN" * 60_000 + b"\n>2\nAC\nGT\n"))
    long, short = read_all(file)
    assert isinstance(long, LeftOut) and long.reason == "too_long" and "300000 letters" in long.detail
    assert isinstance(short, Document) and short.text == "ACGT"
    *parts, whole = read_all(file, part_letters=70_000)
    texts = [part.text for part in parts if isinstance(part, Document)]
    assert [len(text) for text in texts] == [70_000] * 4 + [20_000] and "".join(texts) == "ACGTN" * 60_000
    assert [part.id for part in parts][::4] == [f"{file}: >1, part 1", f"{file}: >1, part 5"]
    assert whole == short
