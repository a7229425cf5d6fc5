"""The tokenizer: if it is wrong, every token of a pretraining run is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

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
from modernbert_train.errors import DataError
from tests.support.corpora import Command

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
