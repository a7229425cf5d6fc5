"""Tokenizers: trained, adapted, trimmed, or of letters. If one is wrong, every token of a pretraining run is."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, EsmTokenizer
from transformers.models.esm.configuration_esm import get_default_vocab_list

from data_prep.make_tokenizer import (
    SPECIAL_TOKENS,
    adapt_tokenizer,
    encode_documents,
    require_size,
    require_unspoken,
    save_tokenizer,
    train_tokenizer,
)
from data_prep.tokenizer import main as command_main
from data_prep.trim_tokenizer import trim_tokenizer
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.vocabulary import read_vocabulary
from tests.support.corpora import Command
from tests.support.make_shards import make_texts

VOCABULARY = 384


@pytest.fixture
def trained(texts: list[str]) -> Tokenizer:
    return train_tokenizer(iter(texts), VOCABULARY)


def test_saved_folder_works_in_transformers(trained: Tokenizer, tmp_path: Path) -> None:
    """The published model is used through AutoTokenizer: template, mask, unknown, pad and lossless decoding."""
    save_tokenizer(trained, tmp_path / "t")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "t")
    assert loaded.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3, 4]
    assert (loaded.pad_token_id, loaded.unk_token_id, loaded.cls_token_id, loaded.sep_token_id) == (0, 1, 2, 3)
    assert (loaded.mask_token_id, len(loaded), loaded.model_max_length) == (4, VOCABULARY, 8192)
    one, two = (loaded(text, add_special_tokens=False)["input_ids"] for text in ("abc", "de"))
    assert dict(loaded("abc")) == {"input_ids": [2, *one, 3], "attention_mask": [1] * (len(one) + 2)}
    assert loaded("abc", "de")["input_ids"] == [2, *one, 3, *two, 3]
    assert loaded("abc [MASK]")["input_ids"] == loaded("abc[MASK]")["input_ids"] == [2, *one, 4, 3]
    text = "Ünïcode 日本\n\n  def f(x):\treturn x  # 🙂"
    assert loaded.decode(loaded(text, add_special_tokens=False)["input_ids"]) == text
    assert loaded.convert_tokens_to_ids("nonsense-token") == 1


def test_literal_special_tokens_are_plain_text(trained: Tokenizer) -> None:
    """Documentation about [MASK] would otherwise put masks and separators into the training text."""
    text = "[CLS] say [MASK], not[SEP] [PAD]\n[UNK]"
    (ids,) = encode_documents(trained, [text])
    assert not set(ids) & {0, 1, 2, 3, 4}
    assert trained.decode(ids) == text


def test_composed_and_decomposed_accents_are_one(trained: Tokenizer) -> None:
    """Texts that look equal must be equal to the model (NFC)."""
    composed, decomposed = encode_documents(trained, ["caf\u00e9", "cafe\u0301"])
    assert composed == decomposed


def test_too_little_text_for_any_vocabulary_is_refused() -> None:
    """A vocabulary with unused rows silently trains a worse model."""
    with pytest.raises(DataError, match="Add text; no vocabulary is smaller than 320"):
        require_size(train_tokenizer(iter(["ab"]), 384), 384)


def test_existing_tokenizer_is_adapted(trained: Tokenizer, tmp_path: Path) -> None:
    """Ids must stay; tokens that masked-language modelling needs are added if the file lacks them."""
    content = json.loads(trained.to_str())
    content["post_processor"] = None
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "[MASK]"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        adapted = adapt_tokenizer(path)
        assert adapted.get_vocab() == trained.get_vocab()
        assert adapted.encode("abc [MASK] and more").ids == trained.encode("abc [MASK] and more").ids


@pytest.mark.runs
def test_dropout_of_a_tokenizer_is_put_off_and_reported(
    command: Command, trained: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the same spec gives other tokens each time, and the dataset's hash is useless."""
    save_tokenizer(trained, tmp_path / "theirs")
    content = json.loads((tmp_path / "theirs/tokenizer.json").read_text())
    content["model"]["dropout"] = 0.5
    (tmp_path / "theirs/tokenizer.json").write_text(json.dumps(content))
    for name in ("a", "b"):
        assert command(f"tokenizer.path={tmp_path}/theirs", f"out={tmp_path}/{name}") == 0
        assert "its BPE dropout of 0.5 is switched off" in capsys.readouterr().err
    a, b = ({path.name: path.read_bytes() for path in (tmp_path / each / "train").iterdir()} for each in "ab")
    assert a == b


def test_errors_name_what_is_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The arguments of `tokenizer` include neither tokenizer.vocab_size nor sources.text0.path."""
    assert command_main(["train", str(tmp_path / "t"), str(tmp_path / "none"), "--entries", "384"]) == 65
    assert command_main(["adapt", str(tmp_path / "t"), str(tmp_path / "none")]) == 65
    said = capsys.readouterr().err
    assert f"TEXT={tmp_path}/none" in said and "TOKENIZER must name a tokenizer folder" in said
    assert not (tmp_path / "t").exists()
    assert "tokenizer." not in said.replace("tokenizer.json", "") and "sources." not in said


def test_existing_tokenizer_without_specials_is_refused(tmp_path: Path) -> None:
    """The loader needs each of the five."""
    Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1, "[PAD]": 2}, unk_token="[UNK]")).save(str(tmp_path / "t.json"))
    with pytest.raises(DataError, match=r"has no \[CLS\], \[SEP\], \[MASK\]\. Set tokenizer\.extend"):
        adapt_tokenizer(tmp_path / "t.json")
    (tmp_path / "t.json").write_text("{")
    with pytest.raises(DataError, match=r"cannot be read .* Give a tokenizer\.json"):
        adapt_tokenizer(tmp_path / "t.json")
    with pytest.raises(DataError, match="No such file"):
        adapt_tokenizer(tmp_path / "gone.json")


def test_tokenizer_that_reads_specials_out_of_text_is_refused() -> None:
    """A whitespace tokenizer finds [MASK] as a word of its vocabulary, with any flags."""
    words = {token: i for i, token in enumerate([*SPECIAL_TOKENS, "say"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (ids,) = encode_documents(tokenizer, ["say [MASK] aloud"])
    with pytest.raises(DataError, match=r"makes \[MASK\] from ordinary text"):
        require_unspoken(tokenizer, np.bincount(ids, minlength=6))
    require_unspoken(tokenizer, np.array([0, 9, 0, 0, 0, 3]))


def test_spare_entries_are_at_the_end_and_no_text_gives_them(texts: list[str], tmp_path: Path) -> None:
    """They are for tokens of a later use; a text that names one must not train it by accident."""
    tokenizer = train_tokenizer(iter(texts), 384, spare_entries=10)
    require_size(tokenizer, 384)
    assert [tokenizer.token_to_id(f"[unused{i}]") for i in range(10)] == list(range(374, 384))
    (ids,) = encode_documents(tokenizer, ["an [unused3] entry"])
    assert max(ids) < 374 and tokenizer.decode(ids) == "an [unused3] entry"
    save_tokenizer(tokenizer, tmp_path / "t")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "t")) == 384


def test_an_uncased_word_has_the_same_tokens_wherever_it_stands(texts: list[str], tmp_path: Path) -> None:
    """Else a query does not find the heading, the identifier or the code block that has its word."""
    (tmp_path / "a.txt").write_text("\n".join(f"{text} Straße größe file_name" for text in texts), encoding="utf-8")
    words = [str(tmp_path / "t"), str(tmp_path / "a.txt"), "--entries", "512", "--spare", "0"]
    assert command_main(["train", *words, "--uncased"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "t")
    (ours,) = encode_documents(adapt_tokenizer(tmp_path / "t"), ["The GRÖSSE (of\n\tFile_Name)."])
    assert ours == tokenizer("the grösse ( of file _ name ) .").input_ids[1:-1]
    assert tokenizer("file").input_ids[1:-1] == tokenizer("File").input_ids[1:-1] == tokenizer.encode("_file")[2:-1]
    assert tokenizer("a\n\n[MASK]  b").input_ids == tokenizer("a [MASK] b").input_ids, "white space says nothing"
    unusual = "🙂 日本語 \u0000 Ελλάδα [SEP]"
    (ids,) = encode_documents(adapt_tokenizer(tmp_path / "t"), [unusual])
    assert min(ids) > 4 and "日本語" in tokenizer.decode(ids).replace(" ", ""), "bytes: no [UNK], accents stay"
    with pytest.raises(SystemExit, match="64"):
        command_main(["train", *words, "--uncased", "--superbpe", "0.8"])


def test_tokenizer_without_specials_is_extended_as_modernbert_extended_olmo(tmp_path: Path) -> None:
    """OLMo's 50,280 entries became 50,368: [UNK], [CLS], [SEP], [PAD], [MASK], then 83 unused ones."""
    vocabulary = {chr(ord("a") + i): i for i in range(20)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.save(str(tmp_path / "t.json"))
    extended = adapt_tokenizer(tmp_path / "t.json", extend=True, spare_entries=50)
    names = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    assert [extended.token_to_id(name) for name in names] == [20, 21, 22, 23, 24]
    assert extended.get_vocab_size() == 128  # 25 + 50, filled to a multiple of 64
    assert extended.token_to_id("[unused0]") == 25 and extended.token_to_id("[unused102]") == 127
    assert extended.encode("abc").ids == [21, 0, 1, 2, 22]
    extended.save(str(tmp_path / "again.json"))
    assert adapt_tokenizer(tmp_path / "again.json", extend=True).get_vocab() == extended.get_vocab()
    (ids,) = encode_documents(adapt_tokenizer(tmp_path / "again.json"), ["[unused0]a"])
    assert ids and max(ids) < 20


def test_command_of_its_own(texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tokenizer that several datasets share is trained once."""
    lines = "".join(json.dumps({"body": text}) + "\n" for text in [*texts, " "])
    (tmp_path / "a.jsonl").write_text(lines)
    words = ["train", str(tmp_path / "t"), str(tmp_path / "a.jsonl"), "--kind", "jsonl", "--text-field", "body"]
    assert command_main([*words, "--entries", "384", "--spare", "4"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{tmp_path / 't'}: 384 entries\n" and "1 damaged or empty" in said.err
    assert Tokenizer.from_file(str(tmp_path / "t/tokenizer.json")).token_to_id("[unused3]") == 383
    assert command_main(["adapt", str(tmp_path / "u"), str(tmp_path / "t")]) == 0
    assert (tmp_path / "u/tokenizer.json").read_bytes() == (tmp_path / "t/tokenizer.json").read_bytes()
    assert command_main([*words, "--entries", "384"]) == 78  # exists


def make(folder: Path, *words: str) -> tuple[Tokenizer, Any]:
    """The tokenizer that the command writes, as this program and as transformers read it."""
    assert command_main(["letters", str(folder), *words]) == 0
    return Tokenizer.from_file(str(folder / "tokenizer.json")), AutoTokenizer.from_pretrained(folder)


def test_transformers_reads_the_same_letters(tmp_path: Path, capsys: Any) -> None:
    """Ids, special tokens, lower case, masks written by hand; 64 entries for 5 special tokens and 29 letters."""
    ours, theirs = make(tmp_path / "p", "--alphabet", "protein")
    assert "64 entries" in capsys.readouterr().out and len(theirs) == 64
    assert theirs.tokenize("MKvx*[MASK]L") == ["M", "K", "V", "X", "*", "[MASK]", "L"]
    text = "MSTNPKPQRKTKRNTNRRPQDVKFPGGGQIVGGVYLLPRRGPRLGVRATRKTSERSQPRGRRQPIPKARRPEG"
    (ids,) = encode_documents(ours, [text])
    assert theirs(text)["input_ids"] == [2, *ids, 3] and len(ids) == len(text) and min(ids) > 4
    assert theirs.decode(ids) == text
    assert theirs("M1K")["input_ids"][2] == theirs.unk_token_id == 1
    assert encode_documents(ours, ["[MASK]"])[0].count(4) == 0, "a text cannot spell a mask"


def test_esm2_has_the_ids_of_the_released_models(tmp_path: Path) -> None:
    """Its weights, read with other ids, would take one amino acid for another."""
    ours, theirs = make(tmp_path / "esm2", "--alphabet", "esm2")
    (tmp_path / "vocab.txt").write_text("\n".join(get_default_vocab_list()), encoding="utf-8")
    released = EsmTokenizer(str(tmp_path / "vocab.txt"))
    text = "MSTNPKPQRKTKRNTNRRPQDVKFPGGGQIVGGVYLLPXBUZO.-"
    assert theirs(text)["input_ids"] == released(text)["input_ids"] and len(theirs) == 33
    assert theirs("MK<mask>L")["input_ids"] == released("MK<mask>L")["input_ids"]
    assert (theirs.pad_token_id, theirs.unk_token_id, theirs.cls_token_id, theirs.sep_token_id) == (1, 3, 0, 2)
    assert theirs.mask_token_id == released.mask_token_id == read_vocabulary(tmp_path / "esm2").mask_id == 32
    assert adapt_tokenizer(tmp_path / "esm2").get_vocab() == ours.get_vocab(), "prepare takes it as it is"


def test_k_mers_follow_each_other_and_the_rest_is_letters(tmp_path: Path) -> None:
    """4 ** 6 of them, in order; an N ends a run, as in the Nucleotide Transformer, and nothing overlaps."""
    ours, theirs = make(tmp_path / "d", "--alphabet", "dna", "--kmer", "6")
    assert theirs.tokenize("ACGTACgtacNACGTACG") == ["ACGTAC", "G", "T", "A", "C", "N", "ACGTAC", "G"]
    kmers = map("".join, itertools.product("ACGT", repeat=6))
    assert [theirs.convert_tokens_to_ids(kmer) for kmer in kmers] == [*range(21, 21 + 4096)]
    assert len(theirs) % 64 == 0 and theirs.decode(theirs("ACGTACGN")["input_ids"][1:-1]) == "ACGTACGN"
    assert encode_documents(ours, ["ACGTACGN"])[0] == theirs("ACGTACGN", add_special_tokens=False)["input_ids"]


def test_letters_of_ones_own_keep_their_case(tmp_path: Path) -> None:
    """Soft-masked regions are information to some: an alphabet with both cases keeps both."""
    _, theirs = make(tmp_path / "rna", "--alphabet", "ACGUacgu-]^")
    assert theirs.tokenize("AcgU-]^") == ["A", "c", "g", "U", "-", "]", "^"]
    _, theirs = make(tmp_path / "signs", "--alphabet", "]^-\\", "--kmer", "2")
    assert theirs.tokenize("]^-\\^") == ["]^", "-\\", "^"]


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


def test_trim_says_what_stays_and_refuses_what_cannot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tokenizer(made("bytes"), tmp_path / "old")
    (tmp_path / "text.txt").write_text("\n".join(make_texts(4)))
    words = [str(tmp_path / name) for name in ("old", "text.txt")]
    assert command_main(["trim", str(tmp_path / "new"), *words, "--entries", "320"]) == 0
    assert "320 entries, which are " in capsys.readouterr().out
    assert Tokenizer.from_file(str(tmp_path / "new/tokenizer.json")).get_vocab_size() == 320
    for entries, message in (("512", "the tokenizer has 512. Give fewer"), ("100", "characters of the text are 261")):
        assert command_main(["trim", str(tmp_path / entries), *words, "--entries", entries]) == 78
        assert f"--entries={entries}: " in (said := capsys.readouterr().err) and message in said
    with pytest.raises(ConfigError, match="Give fewer"):
        trim_tokenizer(made("WordPiece"), [], 512)
