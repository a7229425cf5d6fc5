"""The facts that training reads from a tokenizer. If wrong, [MASK] is another word and random tokens are special."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, processors

from modernbert_train.errors import DataError
from modernbert_train.vocabulary import read_vocabulary

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def write(folder: Path, vocab: Any, added: list[dict[str, Any]]) -> Path:
    content = {"model": {"vocab": vocab}, "added_tokens": added}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def specials(first: int = 0) -> list[dict[str, Any]]:
    return [{"content": text, "id": first + i, "special": True} for i, text in enumerate(SPECIAL)]


def test_it_agrees_with_the_tokenizers_library(tiny_data: Path) -> None:
    vocabulary = read_vocabulary(tiny_data / "tokenizer")
    tokenizer = Tokenizer.from_file(str(tiny_data / "tokenizer/tokenizer.json"))
    assert vocabulary.num_entries == tokenizer.get_vocab_size() == 512
    ids = [vocabulary.pad_id, vocabulary.cls_id, vocabulary.sep_id, vocabulary.mask_id]
    assert ids == [tokenizer.token_to_id(text) for text in ("[PAD]", "[CLS]", "[SEP]", "[MASK]")]
    special = {tokenizer.token_to_id(text) for text in SPECIAL}
    assert vocabulary.ordinary.tolist() == sorted(set(range(512)) - special)
    content = (tiny_data / "tokenizer/tokenizer.json").read_bytes()
    assert vocabulary.sha256 == hashlib.sha256(content).hexdigest()


def test_random_tokens_are_drawn_from_real_entries_only(tmp_path: Path) -> None:
    """Unused entries are meaningless, special ones mislead, and ids may have gaps."""
    added = [*specials(10), {"content": "    ", "id": 20, "special": False}, {"content": "[unused0]", "id": 21}]
    vocabulary = read_vocabulary(write(tmp_path, {"a": 0, "b": 1, "[unused1]": 2, "c": 5}, added))
    assert vocabulary.ordinary.tolist() == [0, 1, 5, 20]
    assert vocabulary.num_entries == 22
    assert (vocabulary.pad_id, vocabulary.mask_id) == (10, 14)


def test_a_unigram_tokenizer_lists_tokens_with_scores(tmp_path: Path) -> None:
    vocab = [[text, 0.0] for text in SPECIAL] + [["a", -1.5], ["b", -2.5]]
    vocabulary = read_vocabulary(write(tmp_path, vocab, specials()))
    assert vocabulary.num_entries == 7 and vocabulary.ordinary.tolist() == [5, 6]


def test_missing_special_tokens_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path, {"a": 0}, [entry for entry in specials(1) if entry["content"] not in ("[SEP]", "[MASK]")])
    with pytest.raises(DataError, match=r"tokenizer.json: lacks \[SEP\], \[MASK\], and neither .* a sep_token, a mask"):
        read_vocabulary(folder)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file.*data.tokenizer must name a tokenizer folder"):
        read_vocabulary(tmp_path / "absent")


@pytest.mark.parametrize(
    "content",
    ["", "not json", "[]", "null", "{}", '{"model": {}}', '{"model": {"vocab": 3}, "added_tokens": []}',
     '{"model": {"vocab": {"a": "x"}}, "added_tokens": []}', '{"model": {"vocab": {"a": 0}}, "added_tokens": [3]}',
     "[" * 100_000, '{"model": {"vocab": {"a": 1e999}}, "added_tokens": []}',
     '{"model": {"vocab": {"a": -1}}, "added_tokens": []}',
     f'{{"model": {{"vocab": {{"a": {10**30}}}}}, "added_tokens": []}}'],
    ids=lambda content: content[:60],
)  # fmt: skip
def test_a_damaged_tokenizer_is_no_crash(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match="tokenizer.json: not a readable tokenizer"):
        read_vocabulary(tmp_path)


@pytest.mark.parametrize(
    ("tokens", "inside"),
    [
        (["the", "##re", "play", "##ing", ".", "##"], ["##re", "##ing"]),  # WordPiece; "##" itself is a mark
        (["Ġthe", "re", "Ġplay", "ing", ".", "Ċ", "Ã©", "ĠĠ"], ["re", "ing", "Ã©"]),  # byte-level
        (["▁the", "re", "▁play", "ing", "."], ["re", "ing"]),  # SentencePiece
        (["the", "play", "."], []),  # of whole words
    ],
)
def test_tokens_inside_words_are_known(tmp_path: Path, tokens: list[str], inside: list[str]) -> None:
    """Masks and spans of whole words end in the middle of one if this is wrong."""
    vocabulary = read_vocabulary(write(tmp_path, {text: i for i, text in enumerate(tokens)}, specials(len(tokens))))
    assert [tokens[i] for i in vocabulary.inside_words] == inside


def test_words_within_a_token_are_counted(tmp_path: Path) -> None:
    """A SuperBPE's token of three words is no word, and three in a row would be nine words to guess."""
    tokens = ["Ġthe", "ĠinĠtheĠend", "ing", "sĠof", "ĠĠĠĠ", "Ġ", "ĠĠĠĠdefĠf", ",Ġand"]
    vocabulary = read_vocabulary(write(tmp_path, {text: i for i, text in enumerate(tokens)}, specials(len(tokens))))
    assert [tokens[i] for i in vocabulary.further_words] == ["ĠinĠtheĠend"] * 2 + ["sĠof", "ĠĠĠĠdefĠf", ",Ġand"]
    assert [tokens[i] for i in vocabulary.inside_words] == ["ing", "sĠof"]


@pytest.mark.parametrize(
    ("template", "segments"),
    [("$A [SEP] $B [SEP]", False), ("$A [SEP] $B:1 [SEP]:1", True), (None, False), ("bert", True), ("roberta", False)],
)
def test_token_types_of_pairs_are_known(tmp_path: Path, template: str | None, segments: bool) -> None:
    """Without the second type an encoder would read pairs otherwise than it was trained."""
    tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate(SPECIAL)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    ends = ("[SEP]", 3), ("[CLS]", 2)
    if template in ("bert", "roberta"):
        kind = processors.BertProcessing if template == "bert" else processors.RobertaProcessing
        tokenizer.post_processor = processors.Sequence([kind(*ends)])
    elif template:
        tokenizer.post_processor = processors.TemplateProcessing("$A", template, list(ends))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert read_vocabulary(tmp_path).segments_of_pairs is segments
    if template:
        assert (1 in tokenizer.encode("[UNK]", "[UNK]").type_ids) is segments
