"""The sample of a text before a run: if it misses something, a user prepares for hours and trains for days in vain."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

from data_prep.sample import look_at_text, scripts_of, token_facts
from modernbert_train.errors import DataError
from tests.support.corpora import WORDS, prose, write


def test_files_of_every_kind_are_found_and_binaries_are_passed_over(tmp_path: Path) -> None:
    for number in range(30):
        write(tmp_path, f"a/{number}.txt", prose(5_000, number))
        write(tmp_path, f"b/{number}.md", prose(1_000, 100 + number))
    write(tmp_path, "rows.jsonl", "".join(json.dumps({"id": n, "content": prose(500, n)}) + "\n" for n in range(100)))
    write(tmp_path, "picture.png", bytes(range(256)) * 40)
    write(tmp_path, "settings.json", json.dumps({"a": 1}, indent=1))
    write(tmp_path, ".hidden/secret.txt", prose(9_000))
    found = look_at_text([str(tmp_path)])
    by_kind = {source.kind: source for source in found.sources.values()}
    assert by_kind["text"].glob == "**/*.{md,txt}" and by_kind["jsonl"].text_field == "content"
    assert len(found.sources) == 2
    assert {name: each.files for name, each in found.taken.items()} == {".txt": 30, ".md": 30, ".jsonl": 1}
    assert {name: each.files for name, each in found.passed_over.items()} == {".png": 1, ".json": 1, "hidden": 1}
    assert found.text_bytes == pytest.approx(30 * 6_000 + 50_000, rel=0.02)
    assert found.documents == pytest.approx(160, rel=0.02) and found.length(0.5) in (500, 1_000)


def test_a_line_can_be_sampled_from_the_middle_of_a_file_of_any_size(tmp_path: Path) -> None:
    """100 GB, mostly a hole: reading the whole file, or on to the end of a line, takes minutes."""
    file = write(tmp_path, "huge.jsonl", "".join(json.dumps({"text": prose(300, n)}) + "\n" for n in range(3_000)))
    with file.open("r+b") as content:
        content.truncate(100 << 30)
    began = time.monotonic()
    found = look_at_text([str(file)])
    assert time.monotonic() - began < 20
    assert found.texts[0] == prose(300, 0) and found.damaged["too_long"] > 0 and found.text_bytes > 1e9


def test_a_huge_file_of_plain_text_is_one_document_and_the_error_says_how_to_cut_it(tmp_path: Path) -> None:
    file = write(tmp_path, "corpus/all.txt", prose(100_000))
    with file.open("r+b") as content:
        content.truncate(100 << 30)
    write(tmp_path, "corpus/readme.md", prose(5_000))
    with pytest.raises(DataError, match=r"107 GB in one file of plain text.*split -C"):
        look_at_text([str(tmp_path / "corpus")])


def test_languages_by_script_and_duplicates_are_counted(tmp_path: Path) -> None:
    for number in range(10):
        write(tmp_path, f"{number}.txt", prose(20_000, number % 5))
        write(tmp_path, f"ru{number}.txt", "Модель читает строки и учится. " * 300 + str(number))
        write(tmp_path, f"zh{number}.txt", "模型阅读文本并学习词语。" * 300 + str(number))
    found = look_at_text([str(tmp_path)])
    assert list(found.scripts) == ["Latin", "Cyrillic", "Chinese"] and math.isclose(sum(found.scripts.values()), 1)
    assert found.duplicates == pytest.approx(5 / 30)
    assert scripts_of(["..."]) == {}


def test_tokens_are_estimated_as_a_tokenizer_would_make_them() -> None:
    """Seventeen words of equal share, each a token with its space: ln 17 = 2.8 nats."""
    facts = token_facts([prose(60_000, number) for number in range(4)], 512)
    assert facts.bytes_per_token == pytest.approx(sum(len(word) + 1 for word in WORDS) / len(WORDS), rel=0.1)
    assert facts.unigram_loss == pytest.approx(math.log(len(set(WORDS))), abs=0.3)


@pytest.mark.runs
def test_files_that_sort_first_are_not_all_that_is_seen(tmp_path: Path) -> None:
    """60 copies of a long file before 120 others: a sample of the copies only would see a single document."""
    for number in range(60):
        write(tmp_path, f"texts/0{number:02}.txt", prose(80_000, 0))
    for number in range(120):
        write(tmp_path, f"texts/other-{number}.txt", prose(40_000, 1 + number))
    found = look_at_text([str(tmp_path / "texts")])
    assert 0.2 < found.duplicates < 0.45 and 140 < found.documents < 220
