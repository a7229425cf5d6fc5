"""SuperBPE. If this breaks, tokens of a pretraining run are not the ones that were counted, or cross lines."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from data_prep import superbpe
from data_prep.make_tokenizer import train_tokenizer
from data_prep.tokenizer import main

ENTRIES = 448
SUPERWORD = re.compile(r"[^ĠĊ]Ġ+[^ĠĊ]")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Sentences with phrases that recur."""
    draw = random.Random(2)
    phrases = ["of the", "in the end", "by the way", "as well as", "a lot of", "café au lait"]
    words = ["".join(draw.choices("aeioubdklm", k=draw.randint(2, 6))) for _ in range(60)]
    for number in range(40):
        parts = [draw.choice(draw.choice((phrases, words))) for _ in range(80)]
        lines = [" ".join(parts[at : at + 20]) + f", in the year {1900 + number}." for at in range(0, 80, 20)]
        (tmp_path / f"corpus/{number:02}.txt").parent.mkdir(exist_ok=True)
        (tmp_path / f"corpus/{number:02}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path / "corpus"


def train(folder: Path, corpus: Path, *words: str) -> Tokenizer:
    assert main(["train", str(folder), str(corpus), "--entries", str(ENTRIES), "--spare", "3", *words]) == 0
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def merges_of(tokenizer: Tokenizer) -> list[list[str]]:
    return json.loads(tokenizer.to_str())["model"]["merges"]


def test_words_are_joined_but_never_lines_or_numbers(corpus: Path, tmp_path: Path, capsys: Any) -> None:
    """The vocabulary has its size, transformers gives the same ids, and text comes back whole."""
    ours, plain = train(tmp_path / "super", corpus, "--superbpe", "0.8"), train(tmp_path / "plain", corpus)
    tokens = sorted(ours.get_vocab(), key=ours.get_vocab().__getitem__)
    assert tokens[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] and tokens[-1] == "[unused2]"
    assert ours.get_vocab_size() == ENTRIES == plain.get_vocab_size()
    superwords = [token for token in tokens if SUPERWORD.search(token)]
    assert len(superwords) > 10 and "ĠinĠthe" in superwords
    assert not [token for token in plain.get_vocab() if SUPERWORD.search(token)]
    assert not [token for token in tokens if "Ċ" in token.strip("Ċ")]
    assert not [token for token in superwords if re.search(r"\d", token)]
    theirs = AutoTokenizer.from_pretrained(tmp_path / "super")
    text = "in the end of the year 1923,\nby the way, café au lait [MASK]\n\n  as well as 12"
    ours.encode_special_tokens = True
    ids = ours.encode(text, add_special_tokens=False).ids
    assert ours.decode(ids) == text
    other = text.replace(" [MASK]", "")
    assert theirs(other)["input_ids"] == [2, *ours.encode(other, add_special_tokens=False).ids, 3]
    capsys.readouterr()
    words = ["fertility", str(tmp_path / "plain"), str(corpus), "--beside", str(tmp_path / "super"), "--json"]
    assert main(words) == 0
    beside = json.loads(capsys.readouterr().out)
    bpe, super_ = (beside[f"{corpus} by {tmp_path / name}"]["tokens_a_word"] for name in ("plain", "super"))
    assert super_ < 0.9 * bpe


def test_each_merge_joins_the_most_frequent_pair(corpus: Path, tmp_path: Path) -> None:
    """Of the second stage: the corpus is encoded again with the merges before each one."""
    ours = train(tmp_path / "super", corpus, "--superbpe", "0.8")
    content = json.loads(ours.to_str())
    merges = content["model"]["merges"]
    texts = [file.read_text(encoding="utf-8") for file in sorted(corpus.iterdir())]
    first = merges_of(train_tokenizer(iter(texts), round(0.8 * (ENTRIES - 3))))
    number = len(first)
    assert merges[:number] == first and len(merges) > number, "the first stage is BPE"
    for at in range(number, len(merges)):
        content["model"]["merges"] = merges[:at]
        pairs: Counter[tuple[str, str]] = Counter()
        for found in Tokenizer.from_str(json.dumps(content)).encode_batch(texts, add_special_tokens=False):
            cuts = pairwise(found.word_ids)  # a merge never crosses one
            pairs.update(pair for pair, (one, other) in zip(pairwise(found.tokens), cuts, strict=True) if one == other)
        assert pairs[tuple(merges[at])] == max(pairs.values()), merges[at]


def test_it_is_deterministic_and_reads_at_most_so_much(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines must be able to share a checkpoint; a crawl of terabytes must not fill memory."""
    words = ("--superbpe", "0.8")
    one, two = (train(tmp_path / name, corpus, *words).to_str() for name in "ab")
    assert one == two
    monkeypatch.setattr(superbpe, "_CHARACTERS", 10_000)
    less = train(tmp_path / "c", corpus, *words)
    assert less.to_str() != one and less.get_vocab_size() == ENTRIES
