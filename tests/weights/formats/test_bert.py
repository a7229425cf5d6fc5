"""Properties of BERT and RoBERTa only in transformers' files: their decoders, and positions that begin at [PAD]."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file

from modernbert_train.config.bert import BertConfig
from modernbert_train.errors import ConfigError
from modernbert_train.weights.formats import bert, read_folder
from modernbert_train.weights.formats.tensors import from_hf, to_hf
from modernbert_train.weights.hf_folder import export
from tests.weights.formats.models import (
    BERT,
    ROBERTA,
    VOCABULARY,
    assert_equal,
    describe,
    weights_of,
)


def test_roberta_counts_positions_from_its_tokenizers_pad() -> None:
    """transformers computes positions from that id: with another one, every position would be another vector."""
    with pytest.raises(ConfigError, match=r"model\.position_offset=2.*which is 1 in this tokenizer"):
        describe(ROBERTA, vocabulary=replace(VOCABULARY, pad_id=0))
    written = describe(replace(ROBERTA, position_offset=1), vocabulary=replace(VOCABULARY, pad_id=0))
    assert (written["model_type"], written["pad_token_id"], written["max_position_embeddings"]) == ("roberta", 0, 41)


def test_a_roberta_has_the_exact_gelu_in_its_head() -> None:
    """transformers' RobertaLMHead ignores hidden_act: with the other GELU logits were off by 1e-3."""
    with pytest.raises(
        ConfigError, match=r"model\.activation=gelu_tanh: transformers' RoBERTa always has the exact GELU"
    ):
        describe(replace(ROBERTA, activation="gelu_tanh"))


@pytest.mark.parametrize("config", [BERT, ROBERTA], ids=["bert", "roberta"])
def test_an_export_is_read_as_long_as_its_run(config: BertConfig, tokenizer_folder: Path, tmp_path: Path) -> None:
    """config.json has the positions, 40; longer texts than in training would be cut elsewhere than by the run."""
    config = replace(config, position_offset=min(config.position_offset, 1) * 12)  # its [PAD] is 11
    export(weights_of(config), config, max_tokens=24, tokenizer_folder=tokenizer_folder, out=tmp_path / "hf", card="")
    found = read_folder(tmp_path / "hf")
    assert (found.model.max_positions, found.max_tokens) == (40, 24)


def test_an_xlm_roberta_is_read_as_the_roberta_that_it_is(tmp_path: Path) -> None:
    """As it was released; every tensor is used."""
    settings = transformers.XLMRobertaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=42, type_vocab_size=1, pad_token_id=1,
    )  # fmt: skip
    transformers.XLMRobertaForMaskedLM(settings).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    found = read_folder(tmp_path)
    assert (found.model.title[0], found.model.max_positions, found.order) == ("RoBERTa", 40, "all")
    assert_equal(to_hf(bert.ROBERTA, from_hf(bert.ROBERTA, stored, found.model, "file"), found.model), stored)
