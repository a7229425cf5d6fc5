"""BERT and RoBERTa as transformers writes them. A bit that is lost here makes another model, without a word."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.batches import lay_out
from modernbert_train.config.bert import BertConfig
from modernbert_train.config.objective import Order
from modernbert_train.config.schema import ComputeConfig
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.models.bert import BertForMaskedLM
from modernbert_train.models.init import initialize
from modernbert_train.models.pairs import PairHead
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats import bert, read_folder
from modernbert_train.weights.formats.bert import PAIR_HEAD
from modernbert_train.weights.formats.tensors import from_hf, to_hf, without_place

BERT = BertConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=48, max_positions=40, init_std=0.1
)
ROBERTA = replace(BERT, segments=1, position_offset=2, norm_eps=1e-5, dropout=0.2)
GOOGLES = replace(BERT, activation="gelu_tanh")
ALL = pytest.mark.parametrize("config", [BERT, GOOGLES, ROBERTA], ids=["bert", "bert-gelu_tanh", "roberta"])
VOCABULARY = Vocabulary(64, cls_id=2, sep_id=3, pad_id=1, mask_id=4, ordinary=np.arange(5, 64), sha256="")
THEIRS = [
    (transformers.BertForMaskedLM, transformers.BertConfig),
    (transformers.BertForPreTraining, transformers.BertConfig),
    (transformers.RobertaForMaskedLM, transformers.RobertaConfig),
]


def weights_of(config: BertConfig, pair_head: bool = False) -> dict[str, Tensor]:
    """Of a model, and of a pair head where asked for; no two values alike, biases too."""
    model = BertForMaskedLM(config)
    initialize(model, config, seed=1)
    modules: dict[str, torch.nn.Module] = {"": model}
    if pair_head:
        modules[f"{PAIR_HEAD}."] = PairHead(config.hidden_size)
    generator = torch.Generator().manual_seed(2)
    for module in modules.values():
        for parameter in module.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return {
        f"{start}{name}": tensor for start, module in modules.items() for name, tensor in module.state_dict().items()
    }


def describe(config: BertConfig, vocabulary: Vocabulary = VOCABULARY) -> dict[str, Any]:
    return bert.describe(config, "all", {"model", "head", "decoder"}, 40, vocabulary)


def read(raw: dict[str, Any], where: str) -> BertConfig:
    model = bert.read(raw, where).model
    assert isinstance(model, BertConfig)
    return model


def write(folder: Path, config: BertConfig, weights: dict[str, Tensor], order: Order = "all") -> Path:
    """As an export: the tensors and config.json."""
    folder.mkdir()
    modules = {name.partition(".")[0] for name in weights}
    save_file(to_hf(bert, weights, config), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(bert.describe(config, order, modules, 40, VOCABULARY)))
    return folder


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@ALL
def test_transformers_loads_the_export_and_computes_the_same(config: BertConfig, tmp_path: Path) -> None:
    """AutoModelForMaskedLM and AutoModel, without remote code, compute what we trained."""
    weights = weights_of(config)
    folder = write(tmp_path / "hf", config, weights)
    twin, report = transformers.AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    encoder = transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False).eval()
    model = BertForMaskedLM(config, ComputeConfig(attention="sdpa"))
    model.load_state_dict(weights, strict=True)
    ids = torch.randint(5, 64, (40,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden_TD = model.eval().encode(lay_out(ids, [0, 40]))
        torch.testing.assert_close(encoder(ids[None]).last_hidden_state[0], hidden_TD, atol=1e-5, rtol=0)
        logits_TV = model.logits(hidden_TD, torch.arange(40))
        torch.testing.assert_close(twin.eval()(ids[None]).logits[0], logits_TV, atol=1e-5, rtol=0)


@ALL
def test_there_and_back_keeps_every_bit(config: BertConfig, tmp_path: Path) -> None:
    """Through our file, and through transformers, which loads it and saves its own."""
    weights = weights_of(config)
    ours = write(tmp_path / "ours", config, weights)
    transformers.AutoModelForMaskedLM.from_pretrained(ours).save_pretrained(tmp_path / "theirs")
    for folder in (ours, tmp_path / "theirs"):
        assert read(json.loads((folder / "config.json").read_text()), "config.json") == config
        assert_equal(from_hf(bert, load_file(folder / "model.safetensors"), config, "file"), weights)


@pytest.mark.parametrize(("kind", "settings"), THEIRS, ids=[kind.__name__ for kind, _ in THEIRS])
def test_what_transformers_saves_comes_back_from_us_bit_by_bit(kind: Any, settings: Any, tmp_path: Path) -> None:
    """Import and export of a model that began there, with its pair head if it has one."""
    shape = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    kind(settings(**shape, intermediate_size=48, max_position_embeddings=42)).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    config = read(json.loads((tmp_path / "config.json").read_text()), "config.json")
    pair_head = kind is transformers.BertForPreTraining
    weights = from_hf(bert, stored, config, "file")
    assert_equal(to_hf(bert, weights, config), stored)
    modules = {name.partition(".")[0] for name in weights}
    assert (PAIR_HEAD in modules) is pair_head
    assert bert.describe(config, "all", modules, 40, VOCABULARY)["architectures"] == [kind.__name__]
    alone = {name: tensor for name, tensor in weights.items() if not name.startswith(PAIR_HEAD)}
    BertForMaskedLM(config).load_state_dict(alone, strict=True)
    # half a head is none: a masked-LM model may be stored with the pooler that it does not use
    half = {name: tensor for name, tensor in stored.items() if "seq_relationship" not in name}
    assert_equal(from_hf(bert, half, config, "file"), alone)


def test_an_export_with_a_pair_head_is_bert_for_pretraining(tmp_path: Path) -> None:
    weights = weights_of(BERT, pair_head=True)
    folder = write(tmp_path / "hf", BERT, weights)
    twin, report = transformers.AutoModelForPreTraining.from_pretrained(folder, output_loading_info=True)
    assert isinstance(twin, transformers.BertForPreTraining)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert torch.equal(twin.cls.seq_relationship.weight, weights["pair_head.classifier.weight"])
    assert_equal(from_hf(bert, load_file(folder / "model.safetensors"), BERT, "file"), weights)


def test_a_roberta_has_no_pair_head() -> None:
    weights = weights_of(ROBERTA, pair_head=True)
    assert without_place(bert, weights, ROBERTA) == (PAIR_HEAD,)
    stored = to_hf(bert, weights, ROBERTA)
    assert_equal(from_hf(bert, stored, ROBERTA, "file"), weights_of(ROBERTA))


@pytest.mark.parametrize("config", [BERT, ROBERTA], ids=["bert", "roberta"])
def test_what_was_trained_in_causal_order_is_a_decoder(config: BertConfig, tmp_path: Path) -> None:
    """transformers' BertLMHeadModel and RobertaForCausalLM compute what we trained."""
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
        said = bert.read(json.loads((each / "config.json").read_text()), "config.json")
        assert said.model == config and said.order == "causal"
        assert_equal(from_hf(bert, load_file(each / "model.safetensors"), config, "file"), weights)


def test_old_files_are_read() -> None:
    """The released BERTs: TensorFlow's names of norms, buffers as tensors, the decoder twice, pooler and pair head."""
    weights = weights_of(BERT, pair_head=True)
    stored = to_hf(bert, weights, BERT)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in stored.items()
    }
    old["bert.embeddings.position_ids"] = torch.arange(40)
    old["cls.predictions.decoder.weight"] = stored["bert.embeddings.word_embeddings.weight"]
    old["cls.predictions.decoder.bias"] = old.pop("cls.predictions.bias")
    assert "cls.predictions.transform.LayerNorm.gamma" in old
    assert_equal(from_hf(bert, old, BERT, "file"), weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_become_fp32(dtype: torch.dtype) -> None:
    stored = {name: tensor.to(dtype) for name, tensor in to_hf(bert, weights_of(ROBERTA), ROBERTA).items()}
    weights = from_hf(bert, stored, ROBERTA, "file")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert_equal(to_hf(bert, weights, ROBERTA), {name: tensor.float() for name, tensor in stored.items()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cls.predictions.bias": None}, r"1 of 42 tensors are missing, the first is cls\.predictions\.bias"),
        ({"bert.encoder.layer.1.attention.self.key.bias": None}, r"the first is bert\.encoder\.layer\.1\.attention"),
        ({"bert.encoder.layer.2.output.dense.bias": torch.ones(32)}, r"unknown, the first is bert\.encoder\.layer\.2"),
        ({"cls.predictions.bias": torch.ones(63)}, r"cls\.predictions\.bias has the shape \(63,\) and not \(64,\)"),
        (
            {"bert.encoder.layer.0.attention.self.query.weight": torch.ones(16, 32)},
            r"self\.query\.weight has the shape \(16, 32\) and not \(32, 32\)",
        ),
        (
            {"cls.predictions.bias": torch.ones(64, dtype=torch.int64)},
            r"cls\.predictions\.bias is of type torch\.int64",
        ),
        ({"cls.predictions.decoder.bias": torch.ones(64, dtype=torch.int64)}, r"decoder\.bias is of type torch\.int64"),
        ({"cls.predictions.decoder.weight": torch.ones(64, 32)}, r"decoder\.weight is not tied to bert\.embeddings"),
        ({"cls.predictions.decoder.bias": torch.ones(64)}, r"decoder\.bias is not tied to cls\.predictions\.bias"),
    ],
)
def test_tensors_that_do_not_fit_are_named(changes: dict[str, Tensor | None], message: str) -> None:
    """By their names in the file, where the user can look."""
    stored = to_hf(bert, weights_of(BERT), BERT) | changes
    with pytest.raises(DataError, match=f"^weights.bin: .*{message}.*Name weights that fit"):
        from_hf(bert, {name: tensor for name, tensor in stored.items() if tensor is not None}, BERT, "weights.bin")


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (BERT, {"model_type": "albert"}, "model_type='albert'"),
        (BERT, {"model_type": ["bert"]}, r"model_type=\['bert'\]"),
        (BERT, {"architectures": ["BertForSequenceClassification"]}, "BertForSequenceClassification"),
        (BERT, {"architectures": None}, "architectures=None"),
        (BERT, {"model_type": "roberta"}, "model_type='roberta', architectures="),
        (BERT, {"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        (ROBERTA, {"position_embedding_type": "relative_key_query"}, "position_embedding_type='relative_key_query'"),
        (BERT, {"is_decoder": True}, "is_decoder=True"),
        (BERT, {"add_cross_attention": True}, "add_cross_attention=True"),
        (BERT, {"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        (BERT, {"pruned_heads": {"0": [1]}}, "pruned_heads="),
        (BERT, {"hidden_act": "relu"}, "hidden_act='relu'"),
        (BERT, {"hidden_act": ["gelu"]}, "hidden_act="),
        (ROBERTA, {"hidden_act": "gelu_new"}, "hidden_act='gelu_new'; of a roberta this encoder only knows gelu"),
        (BERT, {"hidden_size": "32"}, "hidden_size='32', not a whole number above 0"),
        (BERT, {"vocab_size": 64.5}, "vocab_size=64.5, not a whole number above 0"),
        (BERT, {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000, not a whole number"),
        (BERT, {"type_vocab_size": True}, "type_vocab_size=True"),
        (BERT, {"layer_norm_eps": float("nan")}, "layer_norm_eps=nan"),
        (BERT, {"hidden_dropout_prob": 1}, "hidden_dropout_prob=1, not a number from 0.0"),
        (BERT, {"num_attention_heads": 3}, "hidden_size=32 is not a multiple of num_attention_heads=3"),
        (BERT, {"max_position_embeddings": 0}, "max_position_embeddings=0"),
        (ROBERTA, {"max_position_embeddings": 2}, "max_position_embeddings=2, not a whole number from 3"),
        (ROBERTA, {"pad_token_id": -1}, "pad_token_id=-1"),
    ],
)
def test_another_architecture_is_refused(config: BertConfig, changes: dict[str, Any], message: str) -> None:
    """Its weights might even load, and mean something else."""
    with pytest.raises(DataError, match=f"^there: .*{message}"):
        read(describe(config) | changes, "there")


@pytest.mark.parametrize("odd", [None, [], {}, "x", True, -1, 0, 1e300, float("nan"), 10**30], ids=repr)
@pytest.mark.parametrize("config", [BERT, ROBERTA], ids=["bert", "roberta"])
def test_no_value_of_any_key_ends_in_a_traceback(config: BertConfig, odd: Any) -> None:
    """Whatever a fetched file says, it is read or refused."""
    described = describe(config)
    for key in described:
        with contextlib.suppress(DataError):
            assert isinstance(read(described | {key: odd}, "there"), BertConfig)


def test_what_a_file_leaves_out_is_transformers_default() -> None:
    """Old files state little; each class has its own defaults."""
    assert read({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "file") == BertConfig()
    roberta = read({"model_type": "roberta", "architectures": ["RobertaForMaskedLM"]}, "file")
    assert roberta == BertConfig(vocab_size=50265, max_positions=510, position_offset=2)


def test_configs_of_the_released_models_are_read() -> None:
    """bert-base-uncased and roberta-base as published, with keys of their time."""
    shape = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
    common = {"hidden_act": "gelu", "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, **shape}
    bert = {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "gradient_checkpointing": False,
        "vocab_size": 30522,
    }
    bert |= {"position_embedding_type": "absolute", "type_vocab_size": 2, "layer_norm_eps": 1e-12, "pad_token_id": 0}
    assert read(common | bert | {"max_position_embeddings": 512}, "file") == BertConfig()
    roberta = {"model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "vocab_size": 50265, "pad_token_id": 1}
    roberta |= {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 2}
    expected = BertConfig(vocab_size=50265, segments=1, position_offset=2, norm_eps=1e-5)
    assert read(common | roberta | {"max_position_embeddings": 514}, "file") == expected


def test_roberta_counts_positions_from_its_tokenizers_pad() -> None:
    """transformers computes positions from that id: with another one, every position would be another vector."""
    with pytest.raises(ConfigError, match=r"model\.position_offset=2.*which is 1 in this tokenizer"):
        describe(ROBERTA, replace(VOCABULARY, pad_id=0))
    written = describe(replace(ROBERTA, position_offset=1), replace(VOCABULARY, pad_id=0))
    assert (written["model_type"], written["pad_token_id"], written["max_position_embeddings"]) == ("roberta", 0, 41)


def test_a_roberta_has_the_exact_gelu_in_its_head() -> None:
    """transformers' RobertaLMHead reads no hidden_act: with the other one, logits were off by 1e-3."""
    with pytest.raises(ConfigError, match=r"model\.activation=gelu_tanh: transformers' RoBERTa has the exact GELU"):
        describe(replace(ROBERTA, activation="gelu_tanh"))


def test_an_xlm_roberta_is_read_as_the_roberta_that_it_is(tmp_path: Path) -> None:
    """As it was released; every tensor has a place."""
    settings = transformers.XLMRobertaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=42, type_vocab_size=1, pad_token_id=1,
    )  # fmt: skip
    transformers.XLMRobertaForMaskedLM(settings).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    found = read_folder(tmp_path)
    assert (found.model.title[0], found.model.max_positions, found.order) == ("RoBERTa", 40, "all")
    assert_equal(to_hf(bert, from_hf(bert, stored, found.model, "file"), found.model), stored)
