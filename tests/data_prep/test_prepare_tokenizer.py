"""The tokenizer: if it is wrong, every token of a pretraining run is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

from data_prep.tokenizer import (
    SPECIAL_TOKENS,
    adapt_tokenizer,
    encode_documents,
    require_size,
    require_unspoken,
    save_tokenizer,
    train_tokenizer,
)
from modernbert_train.errors import DataError

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


def test_training_is_deterministic(texts: list[str]) -> None:
    """Two machines that prepare the same text must be able to share a checkpoint."""
    assert train_tokenizer(iter(texts), VOCABULARY).to_str() == train_tokenizer(iter(texts), VOCABULARY).to_str()


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


def test_too_little_text_names_the_reachable_size(texts: list[str]) -> None:
    """A vocabulary with unused rows trains a worse model without saying so."""
    tokenizer = train_tokenizer(iter(texts[:20]), 65536)
    with pytest.raises(DataError, match=r"vocab_size=65536.*they give \d+ entries.*vocab_size=\d+ or") as caught:
        require_size(tokenizer, 65536)
    reachable = int(str(caught.value).split("vocab_size=")[2].split()[0])
    require_size(train_tokenizer(iter(texts[:20]), reachable), reachable)
    with pytest.raises(DataError, match="Add text; no vocabulary is smaller than 320"):
        require_size(train_tokenizer(iter(["ab"]), 384), 384)


def test_existing_tokenizer_is_adapted(trained: Tokenizer, tmp_path: Path) -> None:
    """Ids must stay; what masked-language modelling needs must be there even if the file lacks it."""
    content = json.loads(trained.to_str())
    content["post_processor"] = None
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "[MASK]"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        adapted = adapt_tokenizer(path)
        assert adapted.get_vocab() == trained.get_vocab()
        assert adapted.encode("abc [MASK] and more").ids == trained.encode("abc [MASK] and more").ids


def test_existing_tokenizer_without_specials_is_refused(tmp_path: Path) -> None:
    """The loader needs each of the five."""
    Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1, "[PAD]": 2}, unk_token="[UNK]")).save(str(tmp_path / "t.json"))
    with pytest.raises(DataError, match=r"has no \[CLS\], \[SEP\], \[MASK\]\. Add them to t\.json"):
        adapt_tokenizer(tmp_path / "t.json")
    (tmp_path / "t.json").write_text("{")
    with pytest.raises(DataError, match=r"cannot be read .* Give a tokenizer\.json"):
        adapt_tokenizer(tmp_path / "t.json")
    with pytest.raises(DataError, match="No such file"):
        adapt_tokenizer(tmp_path / "gone.json")


def test_tokenizer_that_reads_specials_out_of_text_is_refused() -> None:
    """A whitespace tokenizer finds [MASK] as a word of its vocabulary, flags or not."""
    words = {token: i for i, token in enumerate([*SPECIAL_TOKENS, "say"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (ids,) = encode_documents(tokenizer, ["say [MASK] aloud"])
    with pytest.raises(DataError, match=r"reads \[MASK\] out of ordinary text"):
        require_unspoken(tokenizer, np.bincount(ids, minlength=6))
    require_unspoken(tokenizer, np.array([0, 9, 0, 0, 0, 3]))
