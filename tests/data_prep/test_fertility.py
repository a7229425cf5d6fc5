"""A tokenizer over languages. If this breaks, a tokenizer is chosen that splits some language into bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from data_prep.make_tokenizer import save_tokenizer, train_tokenizer
from data_prep.tokenizer import main

ENGLISH = ["The cat sleeps.", "The dog, too."]
GERMAN = ["Die Katze schläft.", "Der Hund auch."]
THAI = ["แมวหลับ", "หมาด้วย"]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Write the same two sentences in three languages, as JSONL."""
    for name, texts in {"en": ENGLISH, "de": GERMAN, "th": THAI}.items():
        lines = (json.dumps({"text": text}) for text in texts)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return [str(tmp_path / f"{name}.jsonl") for name in ("en", "de", "th")]


@pytest.fixture
def whole_words(tmp_path: Path) -> str:
    """Write a tokenizer with all of the English words, `Katze` and punctuation, without special tokens."""
    known = ["<unk>", "The", "cat", "sleeps", "dog", "too", ".", ",", "Katze"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "words.json"))
    return str(tmp_path / "words.json")


def test_counts_worked_by_hand(files: list[str], whole_words: str, capsys: Any) -> None:
    """English: 6 words, 9 tokens. German: of 8 tokens only `Katze` and two marks are known. Truncation is off."""
    assert main(["fertility", whole_words, *files[:2], "--kind", "jsonl", "--parallel", "--json"]) == 0
    english, german = json.loads(capsys.readouterr().out).values()
    assert english["documents"] == 2 and english["tokens"] == 9 and english["words"] == 6 and english["unknown"] == 0
    assert english["characters"] == english["bytes"] == 28
    assert english["tokens_a_word"] == 1.5 and english["parity"] == 1
    assert german["tokens"] == 8 and german["words"] == 6 and german["unknown"] == 5
    assert german["characters"] == 32 and german["bytes"] == 33, "ä is one character and two bytes"
    assert german["unknown_share"] == 5 / 8 and german["parity"] == 8 / 9 and german["bytes_a_token"] == 33 / 8


def test_a_language_that_the_tokenizer_never_saw(files: list[str], tmp_path: Path, capsys: Any) -> None:
    """Byte by byte: three tokens for a Thai letter, and none unknown; each letter with its signs is a word."""
    save_tokenizer(train_tokenizer(iter(ENGLISH * 9), 320), tmp_path / "bytes")
    assert main(["fertility", str(tmp_path / "bytes"), *files, "--kind", "jsonl", "--parallel"]) == 0
    head, english, _, thai = (line.split("  ") for line in capsys.readouterr().out.splitlines())
    assert [cell.strip() for cell in head if cell] == [
        "text", "documents", "tokens", "tokens a word", "tokens a character", "bytes a token", "unknown", "parity"
    ]  # fmt: skip
    characters = sum(map(len, THAI))
    assert [cell.strip() for cell in thai if cell][2:] == [
        str(3 * characters), f"{3 * characters / 12:.2f}", "3.00", "1.00", "0 %",
        f"{3 * characters / int([cell for cell in english if cell][2]):.2f}",
    ]  # fmt: skip


def test_bad_input(files: list[str], whole_words: str, tmp_path: Path, capsys: Any) -> None:
    """Parity of texts that are not translations of each other would be meaningless."""
    (tmp_path / "one.jsonl").write_text('{"text": "The cat"}')
    (tmp_path / "empty.jsonl").write_text('{"text": ""}')
    read = ["--kind", "jsonl"]
    one = str(tmp_path / "one.jsonl")
    for words, code, message in [
        ([whole_words, files[0], one, *read, "--parallel"], 65, f"{one}: 1 document, and {files[0]} has 2: not"),
        ([whole_words, files[0], files[0], *read], 78, "this text is named twice"),
        ([one, files[0]], 65, f"{one} cannot be read"),
        ([whole_words, str(tmp_path / "empty.jsonl"), *read], 65, "empty.jsonl"),
        ([whole_words, str(tmp_path / "none.jsonl"), *read], 65, "none.jsonl"),
        ([whole_words, files[0], *read, "--text-field", "body"], 65, "--text-field"),
    ]:
        assert main(["fertility", *words]) == code, message
        assert message in capsys.readouterr().err
    assert main(["fertility", whole_words, files[0], one, *read]) == 0
    assert "parity" not in capsys.readouterr().out
