"""Words of a segmenter, from a column of the input to a mark on each token.

If this breaks, whole-word masking uses wrong words: the marks are shifted against the tokens, or rows with another
text's words are silently trained on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from data_prep.make_tokenizer import encode_with_offsets, train_tokenizer
from data_prep.prepare import main
from data_prep.read.documents import Document, read_source
from data_prep.read.html import STRIPPED
from data_prep.read.segmented_words import inside_words
from modernbert_train.config.tools.prepare import SourceConfig
from modernbert_train.data.dataset_card import read_card
from modernbert_train.data.mds import TokenShards
from modernbert_train.data.read.rows import LeftOut
from tests.support.corpora import write_rows
from tests.support.make_shards import VOCAB_SIZE
from tests.support.segmented_corpus import CHARACTERS, write_corpus

CONFIG, DATA = 78, 65


def chinese_bert() -> Tokenizer:
    """Train a tokenizer with a token for each Chinese character, and pieces of Latin words."""
    entries = ["[UNK]", *CHARACTERS, "。", "play", "##ing", "caf", "##e"]
    tokenizer = Tokenizer(models.WordPiece({entry: i for i, entry in enumerate(entries)}, unk_token="[UNK]"))  # type: ignore[call-arg]
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def marks(tokenizer: Tokenizer, words: list[str], text: str) -> list[tuple[str, int]]:
    """Return each token's text, and its mark."""
    ((_, offsets_T2),) = encode_with_offsets(tokenizer, [text])
    inside = inside_words(words, text, offsets_T2)
    return [(text[a:b], int(mark)) for (a, b), mark in zip(offsets_T2.tolist(), inside, strict=True)]


def test_a_token_that_begins_within_a_word_continues_it() -> None:
    """By its place in the original text, for any normaliser of the tokenizer; punctuation is a word."""
    words = ["天地", "玄", "Playing", "黃宇宙", "。", "洪", "Café"]
    text = "天地玄Playing 黃宇宙。\n洪 Café"
    assert marks(chinese_bert(), words, text) == [
        *[("天", 0), ("地", 1), ("玄", 0), ("Play", 0), ("ing", 1), ("黃", 0), ("宇", 1), ("宙", 1)],
        *[("。", 0), ("洪", 0), ("Caf", 0), ("é", 1)],
    ]


def test_parts_of_a_character_and_tokens_across_words_stay_together() -> None:
    """Otherwise part of a word would be masked and the rest visible. Three unmerged bytes each; and tokens of a
    vocabulary that ignores word boundaries."""
    tokenizer = train_tokenizer(iter(["a b " * 99]), 320)
    assert marks(tokenizer, ["天", "地玄"], "天地 玄") == [
        *[("天", 0), ("天", 1), ("天", 1), ("地", 0), ("地", 1), ("地", 1), (" ", 1), ("玄", 1), ("玄", 1), ("玄", 1)]
    ]
    assert inside_words(["ab", "cd"], "abcd", np.array([[0, 1], [1, 3], [3, 4]])).tolist() == [0, 1, 1]
    assert inside_words(["ab", "c"], "ab c", np.array([[0, 2], [2, 4]])).tolist() == [0, 0]
    assert inside_words([], "", np.empty((0, 2), np.int64)).tolist() == []


ROWS: list[dict[str, Any]] = [
    {"text": "天地玄", "words": ["天地", "玄"]},
    {"text": "天 地玄", "words": ["天", " ", "地玄\n"]},
    {"text": "天地", "words": ["天", "玄"]},
    {"text": "天地", "words": ["天"]},
    {"text": "天地", "words": None},
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_every_kind_of_file_has_words(kind: str, tmp_path: Path) -> None:
    """A list, or a text with spaces; words that do not spell their text are left out, with place and reason."""
    file = tmp_path / f"a.{kind}"
    write_rows(file, ROWS)
    source = SourceConfig(kind=kind, path=str(file), words_field="words")  # type: ignore[arg-type]
    items = list(read_source("mine", source, 1000))
    assert [item.words for item in items if isinstance(item, Document)] == [["天地", "玄"], ["天", "地玄"]]
    out = [item for item in items if isinstance(item, LeftOut)]
    reasons = ["other_words", "other_words", "other_words" if kind == "csv" else "no_words"]
    assert [item.reason for item in out] == reasons and all(each.damaged for each in out)
    assert out[0].id == f"{file}:3" and "it has '地' where they have '玄'" in out[0].detail
    assert "it has '地' where they have ''" in out[1].detail


def test_the_text_between_tags_is_counted_as_altered_with_words_too(tmp_path: Path) -> None:
    """The report would otherwise say that such pages were taken as they are."""
    pytest.importorskip("inscriptis")
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"text": "<p>天地</p>", "words": ["天", "地"]}))
    source = SourceConfig(kind="jsonl", path=str(file), words_field="words", strip="html")
    (page,) = read_source("mine", source, 1000)
    assert isinstance(page, Document) and (page.text.strip(), page.altered) == ("天地", STRIPPED)


@pytest.mark.runs
def test_words_reach_the_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Document by document, in several tasks and after a row with wrong words; every character is its bytes."""
    file, rows = write_corpus(tmp_path)
    with file.open("a") as lines:
        lines.write(json.dumps({"text": "天地玄", "words": ["天地"]}) + "\n" + json.dumps(rows[0]) + "\n")
    common = [f"out={tmp_path / 'out'}", "sources.zh={kind: jsonl, words_field: words}", f"sources.zh.path={file}"]
    common += ["tokenizer.vocab_size=384", "task_bytes=80000", "shard_bytes=65536", "validation_share=0"]
    assert main([*common, "max_left_out=0.001"]) == DATA
    said = capsys.readouterr().err
    assert f"other_words 1, the first {file}" in said and "Set sources.zh.words_field to the one with the words" in said
    assert main([*common, "max_left_out=0.02"]) == 0
    folder = tmp_path / "out/train"
    card = read_card(folder)
    assert card.words and card.documents == len(rows)
    report = json.loads((tmp_path / "out/prepare_report.json").read_text())
    assert report["dropped"] == {"other_words": 1, "duplicate": 1}
    shards = TokenShards(folder, card.column, VOCAB_SIZE, 2, card=card)
    tokenizer = Tokenizer.from_file(str(tmp_path / "out/tokenizer/tokenizer.json"))
    for number, row in enumerate(rows):
        inside = shards.inside_words(number)
        assert len(inside) == len(shards.read(number))
        starts = np.flatnonzero(inside == 0).tolist()
        found = [tokenizer.decode(part.tolist()) for part in np.split(shards.read(number), starts[1:])]
        words, at = row["words"], 0
        for each in found:  # a word, or several joined by a token
            first = at
            while "".join(words[first:at]) != each:
                at += 1
        assert at == len(words)
