"""Properties of BERT and RoBERTa only in transformers' files: their decoders, and positions that begin at [PAD]."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from benchmarks.batches import lay_out
from modernbert_train.config.bert import BertConfig
from modernbert_train.config.schema import ComputeConfig
from modernbert_train.errors import ConfigError
from modernbert_train.models.bert import BertForMaskedLM
from modernbert_train.weights.formats import bert, export_format, read, read_folder
from modernbert_train.weights.formats.tensors import from_hf, to_hf, unsupported_heads
from modernbert_train.weights.hf_folder import export
from tests.weights.formats.models import (
    BERT,
    ROBERTA,
    VOCABULARY,
    assert_equal,
    describe,
    weights_of,
    weights_with_pairs,
    write,
)


def test_a_roberta_has_no_pair_head() -> None:
    weights = weights_with_pairs(ROBERTA)
    assert unsupported_heads(bert.ROBERTA, weights, ROBERTA) == ("pair_head",)
    stored = to_hf(bert.ROBERTA, weights, ROBERTA)
    assert_equal(from_hf(bert.ROBERTA, stored, ROBERTA, "file"), weights_of(ROBERTA))


@pytest.mark.runs
@pytest.mark.parametrize("config", [BERT, ROBERTA], ids=["bert", "roberta"])
def test_what_was_trained_in_causal_order_is_a_decoder(config: BertConfig, tmp_path: Path) -> None:
    """transformers' BertLMHeadModel and RobertaForCausalLM compute the same as our model."""
    weights = weights_of(config)
    folder = write(tmp_path / "hf", config, weights, "causal")
    twin, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and twin.config.is_decoder
    model = BertForMaskedLM(config, ComputeConfig(attention="sdpa"))
    model.load_state_dict(weights, strict=True)
    ids = torch.randint(5, 64, (40,), generator=torch.Generator().manual_seed(0))
    packed = lay_out(ids, [0, 15, 40], order="causal")
    with torch.no_grad():
        logits_TV = model.logits(model.eval().encode(packed), torch.arange(40))
        for start, end in ((0, 15), (15, 40)):
            theirs = twin.eval()(ids[None, start:end]).logits[0]
            torch.testing.assert_close(theirs, logits_TV[start:end], atol=1e-5, rtol=0)
    twin.save_pretrained(tmp_path / "theirs")
    for each in (folder, tmp_path / "theirs"):
        said = read(json.loads((each / "config.json").read_text()), "config.json")
        assert said.model == config and said.order == "causal"
        assert_equal(
            from_hf(export_format(config, "causal"), load_file(each / "model.safetensors"), config, "file"), weights
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
