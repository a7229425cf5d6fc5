"""Rows of tokens in another vocabulary. If this breaks, a model with a new tokenizer forgets its words."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from modernbert_train.weights.token_rows import token_rows

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def write(folder: Path, tokenizer: Tokenizer, **roles: str) -> Path:
    """Write a tokenizer folder; the special tokens are added unless roles name others."""
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (roles.values() or SPECIAL)])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    return folder


def byte_level(folder: Path, *tokens: str) -> Path:
    """Write a BPE that has all bytes, and the tokens, spelled with Ġ, by merging letter after letter."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges, entries = [], [*SPECIAL, *alphabet]
    for token in tokens:
        for end in range(2, len(token) + 1):
            if token[:end] not in entries:
                merges.append((token[: end - 1], token[end - 1]))
                entries.append(token[:end])
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(entries)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return write(folder, tokenizer)


def word_piece(folder: Path, *tokens: str) -> Path:
    entries = {token: i for i, token in enumerate([*SPECIAL, *tokens])}
    tokenizer = Tokenizer(models.WordPiece(entries, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return write(folder, tokenizer)


def sentence_piece(folder: Path, *tokens: str) -> Path:
    scores = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("<pad>", 0.0), ("<mask>", 0.0)]
    scores += [(token, -1.0) for token in tokens]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    roles = {"unk": "<unk>", "cls": "<s>", "sep": "</s>", "pad": "<pad>", "mask": "<mask>"}
    return write(folder, tokenizer, **{f"{role}_token": token for role, token in roles.items()})


def ids(folder: Path) -> dict[str, int]:
    return Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()


def pieces(old: Path, new: Path, token: str) -> list[str]:
    """Return the old tokens that make up a new one."""
    rows = token_rows(old, new, max(ids(old).values()) + 1, max(ids(new).values()) + 1)
    names = {i: name for name, i in ids(old).items()}
    end = rows.ends_V[ids(new)[token]]
    return [names[i] for i in rows.pieces_P[end - rows.counts_V[ids(new)[token]] : end].tolist()]


def test_a_vocabulary_replaced_by_itself_changes_nothing(tmp_path: Path) -> None:
    """To the last bit, spare rows too, for the embedding, [V, D], and the biases, [V]."""
    folder = byte_level(tmp_path / "a", "Ġthe", "ion")
    size = len(ids(folder)) + 7
    rows = token_rows(folder, folder, size, size)
    for table in (torch.randn(size, 5), torch.randn(size)):
        assert torch.equal(rows.of(table), table)
    assert str(rows) == f"of {size} rows {size} are kept, 0 are the mean of old ones, 0 the mean of all"


def test_a_new_token_is_the_mean_of_its_old_pieces(tmp_path: Path) -> None:
    """Row and bias, so for any hidden state its logit is the mean of the pieces' logits."""
    old, new = byte_level(tmp_path / "a", "Ġmyo", "card"), byte_level(tmp_path / "b", "Ġmyocard")
    assert pieces(old, new, "Ġmyocard") == ["Ġmyo", "card"]
    rows = token_rows(old, new, len(ids(old)), len(ids(new)))
    table, bias = torch.randn(len(ids(old)), 4), torch.randn(len(ids(old)))
    for each in (table, bias):
        expected = (each[ids(old)["Ġmyo"]] + each[ids(old)["card"]]) / 2
        assert torch.allclose(rows.of(each)[ids(new)["Ġmyocard"]], expected)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        # the same piece of text under three spellings
        ("byte_level", "word_piece", {"the": ["Ġthe"], "##card": ["card"], "thecard": ["Ġthe", "card"], ",": [","]}),
        ("word_piece", "byte_level", {"Ġthe": ["the"], "card": ["##card"], "Ġcardthe": ["the", "##card"], ",": [","]}),
        ("sentence_piece", "byte_level", {"Ġthe": ["▁the"], "card": ["card"], "Ġthecard": ["▁the", "card"]}),
        ("byte_level", "sentence_piece", {"▁the": ["Ġthe"], "card": ["card"], "▁thecard": ["Ġthe", "card"]}),
    ],
)
def test_a_piece_is_found_under_another_spelling(
    tmp_path: Path, old: str, new: str, expected: dict[str, list[str]]
) -> None:
    make = {"byte_level": byte_level, "word_piece": word_piece, "sentence_piece": sentence_piece}
    of_old = {
        "byte_level": ("Ġthe", "card"),
        "word_piece": ("the", "##card", ","),
        "sentence_piece": ("▁the", "card", "▁"),
    }
    tokens = [token for token in expected if token != "," or new != "byte_level"]
    if old == "word_piece":
        expected = expected | {"Ġcardthe": []}  # none of its pieces is known
    there, here = make[old](tmp_path / "old", *of_old[old]), make[new](tmp_path / "new", *tokens)
    assert {token: pieces(there, here, token) for token in expected} == expected


def test_special_tokens_are_found_by_name_then_by_role(tmp_path: Path) -> None:
    """An old tokenizer names them <s>, </s>, <pad> and <mask>; a mean of letters would be wrong."""
    old, new = sentence_piece(tmp_path / "old", "▁the"), byte_level(tmp_path / "new", "Ġthe")
    found = {token: pieces(old, new, token) for token in SPECIAL}
    assert found == {"[CLS]": ["<s>"], "[SEP]": ["</s>"], "[PAD]": ["<pad>"], "[MASK]": ["<mask>"], "[UNK]": ["<unk>"]}


def test_case_and_accents_go_as_the_old_tokenizer_reads_them(tmp_path: Path) -> None:
    old, new = word_piece(tmp_path / "old", "the", "cafe"), byte_level(tmp_path / "new", "ĠThe", "ĠcafÃ©")
    assert pieces(old, new, "ĠThe") == ["the"] and pieces(old, new, "ĠcafÃ©") == ["cafe"]


def test_what_has_no_pieces_is_the_mean_of_all_ordinary_rows(tmp_path: Path) -> None:
    """Bytes of a WordPiece vocabulary, new special tokens, and spare rows; special rows do not count."""
    old, new = word_piece(tmp_path / "old", "the", "##card"), byte_level(tmp_path / "new", "Ġthe")
    table = torch.arange(7.0).reshape(7, 1)
    rows = token_rows(old, new, 7, len(ids(new)) + 2)
    found = rows.of(table)
    assert found[ids(new)["Ã"]].item() == 5.5 == found[-1].item()
    assert (rows.counts_V == 0).sum() > 200 and np.isfinite(found.numpy()).all()


def test_added_tokens_are_spelled_as_in_a_text(tmp_path: Path) -> None:
    """`tokenizer.add_tokens(["myocard"])` of transformers; they lack a Ġ and are not bytes."""
    old = byte_level(tmp_path / "old", "myo", "card", "Ġmyo")
    tokenizer = Tokenizer.from_file(str(old / "tokenizer.json"))
    tokenizer.add_tokens(["myocard", "日"])
    (tmp_path / "new").mkdir()
    tokenizer.save(str(tmp_path / "new/tokenizer.json"))
    assert pieces(old, tmp_path / "new", "myocard") == ["myo", "card"]
    assert pieces(old, tmp_path / "new", "日") == ["æ", "Ĺ", "¥"]
