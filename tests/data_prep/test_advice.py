"""Each error of `prepare` and `tokenizer` that names a key or an option leads to a command that works.

If this breaks, users walk in circles.
"""

from __future__ import annotations

import csv
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from data_prep.tokenizer import main as tokenizer
from tests.support.advice import follow_advice
from tests.support.corpora import Command, Refusal, report_of

Write = Callable[[Path, list[str]], list[str]]
RUSSIAN = "счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему. "
PAGE = (
    "<!DOCTYPE html><html><head><style>p {{}}</style></head><body><p>Page {} has <b>bold</b> words.{}</p></body></html>"
)


def write_texts(folder: Path, end: str, texts: list[str], encoding: str = "utf-8") -> str:
    for i, text in enumerate(texts):
        (folder / f"{i}.{end}").write_bytes(text.encode(encoding))
    return str(folder)


def write_encoded(folder: Path, texts: list[str]) -> list[str]:
    return [f"sources.mine.path={write_texts(folder, 'txt', [RUSSIAN + text for text in texts], 'cp1251')}"]


def write_semicolons(folder: Path, texts: list[str]) -> list[str]:
    with (folder / "rows.csv").open("w", newline="") as file:
        csv.writer(file, delimiter=";").writerows([["text", "number"], *([text, i] for i, text in enumerate(texts))])
    return ["sources.mine.kind=csv", f"sources.mine.path={folder / 'rows.csv'}"]


def write_notes(folder: Path, texts: list[str]) -> list[str]:
    return [f"sources.mine.path={write_texts(folder, 'md', texts)}"]


def write_pages(folder: Path, texts: list[str]) -> list[str]:
    pages = [PAGE.format(number, text) for number, text in enumerate(texts)]
    return [f"sources.mine.path={write_texts(folder, 'html', pages)}", "sources.mine.glob=*.html"]


def write_damaged(folder: Path, texts: list[str]) -> list[str]:
    words = write_notes(folder, texts)
    (folder / "bad.md").write_bytes(b"\x81\x82 bad")
    return [*words, "sources.mine.glob=*.md"]


def write_damaged_for_stop(folder: Path, texts: list[str]) -> list[str]:
    return [*write_damaged(folder, texts), "on_error=stop"]


def notes(*more: str) -> Write:
    return lambda folder, texts: [*write_notes(folder, texts), "sources.mine.glob=*.md", *more]


# mistake -> its files, the advice in the message, and the words that a user adds for it
CASES: dict[str, tuple[Write, str, str]] = {
    "another encoding": (write_encoded, r"Set (sources\.mine\.encoding=cp1251)", "{0}"),
    "another delimiter": (write_semicolons, r'set (delimiter): "(;)"', "sources.mine.{0}='{1}'"),
    "no file": (write_notes, r"set (sources\.mine\.glob) to .* such as ([^ ]+)\.\n", "{0}={1}"),
    "pages": (write_pages, r"Set (sources\.mine\.strip)=html .* or =(nothing)", "{0}={1}"),
    "one bad file": (write_damaged, r"set (sources\.mine\.max_left_out) to the share", "{0}=0.1"),
    "a stop": (write_damaged_for_stop, r"set (on_error=skip)", "{0} max_left_out=0.1"),
    "too little text": (notes("tokenizer.vocab_size=32768"), r"Set (tokenizer\.vocab_size=\d+) or less", "{0}"),
    "an odd size": (notes("tokenizer.vocab_size=500"), r"(\S+)=500: .* nearest is (\d+)", "{0}={1}"),
    "buckets": (notes("near_duplicates.buckets=4"), r"Set (duplicates=near)", "{0}"),
    "long documents": (notes("max_characters=100"), r"Raise (max_characters)", "{0}=100000"),
}


@pytest.mark.runs
@pytest.mark.parametrize("case", CASES)
def test_the_advice_of_an_error_leads_to_a_dataset(
    command: Command, texts: list[str], tmp_path: Path, capsys: Any, case: str
) -> None:
    write, advice, taken = CASES[case]
    (tmp_path / "in").mkdir()
    follow_advice(lambda words: command(*words), write(tmp_path / "in", texts), advice, taken, capsys)


@pytest.mark.runs
def test_html_becomes_text_only_where_its_source_says_so(
    command: Command, refusal: Refusal, texts: list[str], tmp_path: Path
) -> None:
    """Tags, scripts and styles were a part of the text, and nothing reported it; a file without .html is found too."""
    (tmp_path / "in").mkdir()
    words = write_pages(tmp_path / "in", texts)
    (tmp_path / "in/0.html").rename(tmp_path / "in/0.txt")
    assert f"html 60, the first {tmp_path}/in/0.txt: HTML" in refusal(65, *words, "sources.mine.glob=*")
    pytest.importorskip("inscriptis", reason="extra html is not installed")
    assert command(*words, "sources.mine.glob=*", "sources.mine.strip=html", "duplicates=keep") == 0
    report = report_of(tmp_path / "out")
    assert report["altered"] == {"stripped_html": 60} and not report["dropped"]
    from data_prep.read.html import html_text

    assert html_text(PAGE.format(3, "")).strip() == "Page 3 has bold words."


def test_two_sources_do_not_read_one_file(refusal: Refusal, corpus: Path) -> None:
    """Its documents would be counted and reported twice; two columns of a table are two sources."""
    error = refusal(78, "sources.again.kind=text", f"sources.again.path={corpus}/part1")
    assert f"sources.mine and sources.again: both read {corpus}/part1/001.txt." in error
    assert "set sources.again.glob to other files" in error


@pytest.mark.runs
def test_a_runaway_expression_costs_a_document_its_seconds(command: Command, corpus: Path, capsys: Any) -> None:
    """(a+)+b backtracks for years over thirty letters."""
    (corpus / "a.txt").write_text("a" * 60)
    begun = time.monotonic()
    runaway = ["filters.no.filter=RegexFilter", "filters.no.arguments.regex_exp=(a|a|aa)+$x", "max_left_out=0.1"]
    assert command(*runaway, "filters.no.timeout_seconds=0.3") == 0
    assert time.monotonic() - begun < 120
    assert "1 no: failed" in capsys.readouterr().out


SMALL = ("--entries", "384", "--spare", "0")


def write_rows(folder: Path, texts: list[str]) -> list[str]:
    rows = "".join(json.dumps({"body": text}) + "\n" for text in texts)
    return ["train", "OUT", f"{write_texts(folder, 'jsonl', [rows])}/0.jsonl", "--kind", "jsonl", *SMALL]


def write_bare(folder: Path, texts: list[str]) -> list[str]:
    """Write a tokenizer without special tokens."""
    Tokenizer(models.BPE({chr(ord("a") + i): i for i in range(20)}, [])).save(f"{folder}/bare.json")
    return ["adapt", "OUT", f"{folder}/bare.json"]


def train(end: str, *words: str, encoding: str = "utf-8", form: str = "{}") -> Write:
    return lambda folder, texts: [
        "train", "OUT", write_texts(folder, end, [form.format(text) for text in texts], encoding), *SMALL, *words,
    ]  # fmt: skip


def letters(*words: str) -> Write:
    return lambda *_: ["letters", "OUT", "--alphabet", *words]


SHARE = r"(--superbpe) {}: the first stage's share is above 0.* Give ([\d.]+)\.\n"
# mistake -> its command, the advice in the message, and the options that a user adds for it
TOKENIZER_CASES: dict[str, tuple[Write, str, str]] = {
    "too little text": (train("txt", "--entries", "32768"), r"Set (--entries)=(\d+) or less", "{0} {1}"),
    "an odd size": (train("txt", "--entries", "500"), r"(--entries)=500: .* nearest is (\d+)", "{0} {1}"),
    "no share": (train("txt", "--superbpe", "0"), SHARE.format("0"), "{0} {1}"),
    "a share above 1": (train("txt", "--superbpe", "1.1"), SHARE.format(r"1\.1"), "{0} {1}"),
    "another column": (write_rows, r"Set (--text-field) to the one", "{0} body"),
    "another encoding": (train("txt", encoding="cp1251", form=RUSSIAN + "{}"), r"Set (--encoding=cp1251)\.", "{0}"),
    "pages": (train("txt", form="<!DOCTYPE html><html>{}</html>"), r"Set (--strip)=html .* or =(nothing)", "{0} {1}"),
    "no special tokens": (write_bare, r"has no \[.* Add (--extend)", "{0}"),
    "one letter": (letters("a"), r"(--alphabet) a: give (protein), dna, esm2, or several letters", "{0} {1}"),
    "a letter twice": (letters("AAC"), r"(--alphabet) AAC: give (protein), dna, esm2, or several", "{0} {1}"),
    "a blank": (letters("A C"), r"(--alphabet) A C: give (protein), dna, .* without white space", "{0} {1}"),
    "too long a k": (letters("dna", "--kmer", "11"), r"(--kmer) 11: 4\^11 tokens.* Give (1) or more", "{0} {1}"),
    "no k": (letters("dna", "--kmer", "0"), r"(--kmer) 0: .*Give (1) or more", "{0} {1}"),
}


@pytest.mark.parametrize("case", TOKENIZER_CASES)
def test_the_advice_of_an_error_leads_to_a_tokenizer(texts: list[str], tmp_path: Path, capsys: Any, case: str) -> None:
    write, advice, taken = TOKENIZER_CASES[case]
    (tmp_path / "in").mkdir()
    words = [str(tmp_path / "out") if word == "OUT" else word for word in write(tmp_path / "in", texts)]
    error = follow_advice(tokenizer, words, advice, taken, capsys)
    assert not re.search(r"sources\.|tokenizer\.\w+[= ]|max_left_out|max_characters", error), error


def test_a_folder_without_the_usual_files_is_read_by_a_pattern(texts: list[str], tmp_path: Path, capsys: Any) -> None:
    """A folder of .md files used to end in advice to set sources.text0.glob, which no option sets."""
    folder = write_texts(tmp_path, "md", texts)
    assert tokenizer(["train", f"{tmp_path}/out", folder, *SMALL]) == 65
    error = capsys.readouterr().err
    assert (found := re.search(r"or name a pattern of your files, such as (\S+)\.\n", error)), error
    assert tokenizer(["train", f"{tmp_path}/out", f"{folder}/{found[1]}", *SMALL]) == 0
