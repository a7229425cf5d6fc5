"""A smaller vocabulary. If this breaks, a student's tokens differ from its teacher's, or text becomes [UNK]."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from data_prep.make_tokenizer import SPECIAL_TOKENS, encode_documents, save_tokenizer, train_tokenizer
from data_prep.tokenizer import main
from data_prep.trim_tokenizer import trim_tokenizer
from modernbert_train.errors import ConfigError
from tests.support.make_shards import make_texts

ENTRIES = {"bytes": 320, "BPE": 200, "Unigram": 70, "WordPiece": 150}


def made(kind: str) -> Tokenizer:
    """Train a tokenizer of 512 entries, eight of them spare."""
    texts = make_texts(40)
    if kind == "bytes":
        return train_tokenizer(iter(texts), 512, 8)
    settings = {"vocab_size": 504, "special_tokens": list(SPECIAL_TOKENS), "show_progress": False}
    model, trainer = {
        "BPE": (models.BPE(unk_token="[UNK]"), trainers.BpeTrainer(**settings)),
        "Unigram": (models.Unigram(), trainers.UnigramTrainer(**settings, unk_token="[UNK]")),
        "WordPiece": (models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer(**settings)),
    }[kind]
    tokenizer = Tokenizer(model)
    words = kind == "WordPiece"
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer() if words else pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.WordPiece() if words else decoders.Metaspace()
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(f"[unused{i}]", normalized=False) for i in range(8)])
    return tokenizer


@pytest.mark.parametrize("kind", ["bytes", "BPE", "Unigram", "WordPiece"])
def test_the_tokens_that_a_text_uses_most_stay(kind: str) -> None:
    """Special tokens stay too, and pieces that spell every other word; the text is tokenised as before."""
    old, text = made(kind), make_texts(8)
    new, stays = trim_tokenizer(old, text, ENTRIES[kind])
    before, after = old.get_vocab(), new.get_vocab()
    assert sorted(after.values()) == [*range(ENTRIES[kind])]
    assert {*SPECIAL_TOKENS} <= after.keys() <= before.keys() and "[unused0]" not in after
    assert sorted(after, key=after.__getitem__) == sorted(after, key=before.__getitem__), "the order of ids"

    by_id = {number: token for token, number in before.items()}
    counts = Counter(by_id[number] for ids in encode_documents(old, text) for number in ids)
    dropped = max(counts[token] for token in before.keys() - after.keys())
    assert stays == pytest.approx(sum(counts[token] for token in after) / counts.total())
    assert 0.4 < stays < 1 and sum(counts[token] > dropped for token in after) > 20, "the most frequent"

    words = sorted({word for each in text for word in each.split()})
    same = 0
    for word in words:
        first, again = old.encode(word, add_special_tokens=False), new.encode(word, add_special_tokens=False)
        assert "[UNK]" not in again.tokens and new.decode(again.ids) == word
        if {*first.tokens} <= after.keys():
            assert again.tokens == first.tokens
            same += 1
    assert same > 20
    pair = new.encode("a", "b")
    assert [pair.ids[0], pair.ids[-1]] == [after["[CLS]"], after["[SEP]"]] and pair.tokens.count("[SEP]") == 2


def test_a_merge_stays_with_what_it_merges() -> None:
    """A token without its parts could never be produced."""
    new, _ = trim_tokenizer(made("bytes"), make_texts(3), 300)
    model = json.loads(new.to_str())["model"]
    merged = {a + b for a, b in model["merges"]}
    assert merged == {token for token in model["vocab"] if len(token) > 1 and token not in SPECIAL_TOKENS}
    assert all({a, b} <= model["vocab"].keys() for a, b in model["merges"])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tokenizer(made("bytes"), tmp_path / "old")
    (tmp_path / "text.txt").write_text("\n".join(make_texts(4)))
    words = [str(tmp_path / name) for name in ("old", "text.txt")]
    assert main(["trim", str(tmp_path / "new"), *words, "--entries", "320"]) == 0
    assert "320 entries, which are " in capsys.readouterr().out
    assert Tokenizer.from_file(str(tmp_path / "new/tokenizer.json")).get_vocab_size() == 320
    for entries, message in (("512", "the tokenizer has 512. Give fewer"), ("100", "characters of the text are 261")):
        assert main(["trim", str(tmp_path / entries), *words, "--entries", entries]) == 78
        assert f"--entries={entries}: " in (said := capsys.readouterr().err) and message in said
    with pytest.raises(ConfigError, match="Give fewer"):
        trim_tokenizer(made("WordPiece"), [], 512)
