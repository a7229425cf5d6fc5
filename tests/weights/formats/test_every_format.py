"""Every kind of model as transformers writes it. A single lost bit silently makes another model."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.batches import lay_out
from modernbert_train.config.objective import Order
from modernbert_train.config.schema import (
    AlbertConfig,
    BertConfig,
    ComputeConfig,
    DebertaConfig,
    DistilBertConfig,
    EsmConfig,
    MaskedLmConfig,
    ModelConfig,
    PermutationLmConfig,
    XLNetConfig,
)
from modernbert_train.errors import DataError
from modernbert_train.models.build import build_model
from modernbert_train.plan import parameters as planned
from modernbert_train.weights.formats import export_format, read, read_folder
from modernbert_train.weights.formats.tensors import from_hf
from modernbert_train.weights.hf_folder import load_weights
from tests.support.encoders import ALBERT, BERT, ENCODERS, ESM, LLAMAS, MODERNBERT, ROBERTA, XLNET, ids
from tests.support.front_door import Cli
from tests.weights.formats.models import (
    SAID,
    UNSAID,
    assert_equal,
    describe,
    stored,
    weights_of,
    weights_with_pairs,
    write,
)

ORDERS: tuple[Order, ...] = ("all", "causal")
CASES: dict[str, tuple[ModelConfig, Order]] = {
    **{name: (config, "all") for name, config in (SAID | UNSAID).items()},
    **{f"{name}, {order}": (config, order) for name, config in LLAMAS.items() for order in ORDERS},
    **{f"modernbert, {order}": (MODERNBERT, order) for order in ORDERS},
    "bert, causal": (BERT, "causal"),
    "roberta, causal": (ROBERTA, "causal"),
    "xlnet, causal": (XLNET, "causal"),
    "xlnet, given": (XLNET, "given"),
    "xlnet with the other gelu": (replace(XLNET, activation="gelu_tanh"), "all"),
    "distilbert": (ENCODERS["distilbert"], "all"),
    "esm": (ESM, "all"),
    "esm, plain": (replace(ESM, token_dropout=False, rope_theta=500.0), "all"),
}
GROUP_1 = "albert.encoder.albert_layer_groups.1.albert_layers.0."
QUERY, LAYER_3 = "bert.encoder.layer.0.attention.self.query.weight", "bert.encoder.layer.3.output.dense.bias"
BIAS, DECODER_BIAS = "cls.predictions.bias", "cls.predictions.decoder.bias"
POSITIONS = "deberta.embeddings.position_embeddings.weight"
DECODERS = {"bert": "cls.predictions.decoder.weight", "albert": "predictions.decoder.weight", "xlnet": "lm_loss.weight"}
BOUNDARIES = [0, 3, 40]  # the second is longer than local layers see


def read_tensors(found: dict[str, Tensor], config: ModelConfig, where: str = "file") -> dict[str, Tensor]:
    return from_hf(export_format(config, "all"), found, config, where)


@pytest.mark.runs
@pytest.mark.parametrize("name", CASES)
def test_transformers_loads_the_export_computes_the_same_and_gives_it_back(name: str, tmp_path: Path) -> None:
    """Through the usual classes, without remote code, each sequence alone; bit by bit through our file and through
    transformers'."""
    config, order = CASES[name]
    weights = weights_of(config)
    folder = write(tmp_path / "hf", config, weights, order)
    (written,) = json.loads((folder / "config.json").read_text())["architectures"]
    auto = transformers.AutoModelForMaskedLM if "MaskedLM" in written else transformers.AutoModelForCausalLM
    twin, report = auto.from_pretrained(folder, output_loading_info=True)
    assert type(twin).__name__ == written and not report["unexpected_keys"]
    drawn = [key for key in report["missing_keys"] if "contact_head" not in key and "inv_freq" not in key]
    assert drawn == [], "an ESM's head for contacts and its computed angles alone"
    no_pooler = {"add_pooling_layer": False} if isinstance(config, BertConfig | AlbertConfig) else {}
    encoder = transformers.AutoModel.from_pretrained(folder, **no_pooler).eval()
    model: Any = build_model(config, MaskedLmConfig(), ComputeConfig(attention="sdpa"))
    model.load_state_dict(weights, strict=True)
    ids_T = ids(40)
    with torch.no_grad():
        packed = lay_out(ids_T, BOUNDARIES, order="causal" if order == "causal" else "all")
        hidden_TD = model.eval().encode(packed)
        logits_TV = model.logits(hidden_TD, torch.arange(40))
        for start, end in itertools.pairwise(BOUNDARIES):
            states, logits = encoder(ids_T[None, start:end])[0][0], twin.eval()(ids_T[None, start:end]).logits[0]
            torch.testing.assert_close(states, hidden_TD[start:end], atol=3e-5, rtol=1e-5)
            torch.testing.assert_close(logits, logits_TV[start:end], atol=3e-5, rtol=1e-5)
    twin.save_pretrained(tmp_path / "theirs")
    for each in (folder, tmp_path / "theirs"):
        found = read_folder(each)
        apart = {"sharing": "none", "groups": 1, "group_layers": 1}  # a config.json cannot describe sharing
        assert found.model == (replace(config, **apart) if name in UNSAID else config)  # type: ignore[arg-type]
        assert found.order == order and found.model.stored == config.stored
        assert_equal(load_weights(each, config), weights)


SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 48}
SIZES |= {"max_position_embeddings": 42}
OF_XLNET = {"vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}
NARROW = SIZES | {"embedding_size": 16}


@pytest.mark.runs
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("BertForPreTraining", SIZES),
        ("RobertaForMaskedLM", SIZES),
        ("XLMRobertaForMaskedLM", SIZES),
        ("AlbertForMaskedLM", NARROW),
        ("AlbertForMaskedLM", NARROW | {"num_hidden_groups": 2}),
        ("AlbertForMaskedLM", NARROW | {"inner_group_num": 3}),
        ("AlbertForPreTraining", NARROW),
        ("AlbertForPreTraining", NARROW | {"inner_group_num": 3}),
        ("XLNetLMHeadModel", OF_XLNET),
    ],
)
def test_what_transformers_saves_comes_back_from_us_bit_by_bit(
    kind: str, settings: dict[str, int], tmp_path: Path
) -> None:
    """Import and export of transformers' model, all its shapes, and its pair head if it has one."""
    theirs = getattr(transformers, kind)
    theirs(theirs.config_class(**settings)).save_pretrained(tmp_path)
    found, raw = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    config, order = read(raw, "config.json").model, read(raw, "config.json").order
    assert order == ("given" if kind.startswith("XLNet") else "all"), "as XLNet was published"
    assert config.num_layers == settings.get("num_hidden_layers", 2) * settings.get("inner_group_num", 1)
    weights = read_tensors(found, config)
    assert_equal(stored(config, weights), found)
    modules = tuple({name.partition(".")[0] for name in weights})
    assert ("pair_head" in modules) is kind.endswith("PreTraining")
    written = describe(config, order, modules)
    assert {key: written[key] for key in settings} == {key: raw[key] for key in settings}
    assert written["architectures"] == [kind.removeprefix("XLM")], "an XLM-RoBERTa is the RoBERTa that it is"
    alone = {name: tensor for name, tensor in weights.items() if not name.startswith("pair_head")}
    build_model(config, PermutationLmConfig()).load_state_dict(alone, strict=True)
    # an incomplete head is ignored: a masked-LM model may be stored with a pooler that it does not use
    half = {name: tensor for name, tensor in found.items() if "seq_relationship" not in name and "sop" not in name}
    assert_equal(read_tensors(half, config), alone)


OLD_NORMS = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
OF_DEBERTA = {
    "cls.predictions.transform.": "lm_predictions.lm_head.", "cls.predictions.bias": "lm_predictions.lm_head.bias"
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "renamed", "added"),
    [
        (BERT, OLD_NORMS | {BIAS: DECODER_BIAS}, "bert.embeddings.position_ids"),
        (ALBERT, {"predictions.bias": "predictions.decoder.bias"}, "albert.embeddings.position_ids"),
        *((SAID[name], OF_DEBERTA, POSITIONS) for name in ("deberta", "deberta v1", "deberta, narrow")),
        (XLNET, {}, "transformer.word_embedding.weight"),
    ],
    ids=["bert", "albert", "deberta", "deberta v1", "deberta, narrow", "xlnet"],
)
def test_old_files_are_read(config: ModelConfig, renamed: dict[str, str], added: str) -> None:
    """TensorFlow's names of norms, DeBERTa's of the head, a tensor of no effect, a duplicate decoder, and a pair
    head."""
    weights = weights_with_pairs(config) if config.model_type in ("bert", "albert") else weights_of(config)
    found = stored(config, weights)
    table = next(found[name] for name in found if name.endswith(("word_embeddings.weight", "word_embedding.weight")))
    for new, old in renamed.items():
        assert any(new in name for name in found)
        found = {name.replace(new, old): tensor for name, tensor in found.items()}
    found |= {added: torch.arange(400) if "ids" in added else torch.ones(400, 48)} if added not in found else {}
    found |= {DECODERS[config.model_type]: table} if config.model_type in DECODERS else {}
    assert_equal(read_tensors(found, config), weights)


@pytest.mark.parametrize(
    ("config", "name", "tensor", "message"),
    [
        (BERT, BIAS, None, r"1 of 58 tensors are missing, the first is cls\.predictions\.bias"),
        (BERT, LAYER_3, torch.ones(64), r"unknown, the first is bert\.encoder\.layer\.3"),
        (BERT, QUERY, torch.ones(32, 64), r"self\.query\.weight has the shape \(32, 64\) and not \(64, 64\)"),
        (BERT, BIAS, torch.ones(160, dtype=torch.int64), r"cls\.predictions\.bias is of type torch\.int64"),
        (BERT, DECODERS["bert"], torch.ones(160, 64), r"decoder\.weight is not tied to bert\.embeddings"),
        (BERT, DECODER_BIAS, torch.ones(160), r"decoder\.bias is not tied to cls\.predictions\.bias"),
        (ALBERT, GROUP_1 + "ffn.bias", torch.ones(96), r"unknown, the first is albert\.encoder\.albert_layer_gr"),
        (ALBERT, DECODERS["albert"], torch.ones(160, 24), r"decoder\.weight is not tied to albert\.embeddings"),
        (XLNET, "transformer.mask_emb", torch.ones(1, 32), r"mask_emb has the shape \(1, 32\) and not \(1, 1, 32\)"),
        (XLNET, DECODERS["xlnet"], torch.ones(160, 32), r"lm_loss\.weight is not tied"),
    ],
)
def test_tensors_that_do_not_fit_are_named(config: ModelConfig, name: str, tensor: Tensor | None, message: str) -> None:
    """By their names in the file, where the user can look."""
    found = stored(config, weights_of(config)) | {name: tensor}
    with pytest.raises(DataError, match=f"^weights.bin: .*{message}.*Name weights that fit"):
        read_tensors({name: tensor for name, tensor in found.items() if tensor is not None}, config, "weights.bin")


BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
COMMON = {"hidden_act": "gelu", "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, **BASE}
OF_ALBERT = {
    **COMMON, "model_type": "albert", "architectures": ["AlbertForMaskedLM"], "embedding_size": 128, "gap_size": 0,
    "inner_group_num": 1, "num_hidden_groups": 1, "net_structure_type": 0, "num_memory_blocks": 0, "vocab_size": 30000,
    "down_scale_factor": 1, "type_vocab_size": 2, "max_position_embeddings": 512, "layer_norm_eps": 1e-12,
}  # fmt: skip
V2 = {"hidden_act": "gelu_new", "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
OF_V3 = {
    **COMMON, "model_type": "deberta-v2", "initializer_range": 0.02, "max_position_embeddings": 512,
    "relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True,
    "pos_att_type": "p2c|c2p", "layer_norm_eps": 1e-7, "max_relative_positions": -1, "position_biased_input": False,
    "type_vocab_size": 0, "vocab_size": 128100,
}  # fmt: skip
RELEASED: dict[str, tuple[dict[str, Any], ModelConfig]] = {
    "bert-base-uncased": (
        {
            **COMMON, "model_type": "bert", "architectures": ["BertForMaskedLM"], "gradient_checkpointing": False,
            "vocab_size": 30522, "position_embedding_type": "absolute", "type_vocab_size": 2, "layer_norm_eps": 1e-12,
            "pad_token_id": 0, "max_position_embeddings": 512,
        },
        BertConfig(),
    ),
    "roberta-base": (
        {
            **COMMON, "model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "vocab_size": 50265,
            "pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 2,
            "max_position_embeddings": 514,
        },
        BertConfig(vocab_size=50265, segments=1, position_offset=2, norm_eps=1e-5),
    ),
    "albert-base-v1": (OF_ALBERT, AlbertConfig(activation="gelu", dropout=0.1)),
    "albert-base-v2": (OF_ALBERT | V2, AlbertConfig()),
    "xlnet-base-cased": (
        {
            "architectures": ["XLNetLMHeadModel"], "attn_type": "bi", "bi_data": False, "clamp_len": -1, "d_head": 64,
            "d_inner": 3072, "d_model": 768, "dropout": 0.1, "ff_activation": "gelu", "initializer_range": 0.02,
            "layer_norm_eps": 1e-12, "mem_len": 384, "model_type": "xlnet", "n_head": 12, "n_layer": 12,
            "reuse_len": 256, "same_length": False, "summary_type": "last", "untie_r": True, "vocab_size": 32000,
        },
        XLNetConfig(),
    ),
    "distilbert-base-uncased": (
        {
            "activation": "gelu", "architectures": ["DistilBertForMaskedLM"], "attention_dropout": 0.1, "dim": 768,
            "dropout": 0.1, "hidden_dim": 3072, "initializer_range": 0.02, "max_position_embeddings": 512,
            "model_type": "distilbert", "n_heads": 12, "n_layers": 6, "pad_token_id": 0, "qa_dropout": 0.1,
            "seq_classif_dropout": 0.2, "sinusoidal_pos_embds": False, "tie_weights_": True, "vocab_size": 30522,
        },
        DistilBertConfig(),
    ),
    "esm2_t6_8M_UR50D": (
        {
            "architectures": ["EsmForMaskedLM"], "attention_probs_dropout_prob": 0.0, "classifier_dropout": None,
            "emb_layer_norm_before": False, "esmfold_config": None, "hidden_act": "gelu", "hidden_dropout_prob": 0.0,
            "hidden_size": 320, "initializer_range": 0.02, "intermediate_size": 1280, "is_folding_model": False,
            "layer_norm_eps": 1e-05, "mask_token_id": 32, "max_position_embeddings": 1026, "model_type": "esm",
            "num_attention_heads": 20, "num_hidden_layers": 6, "pad_token_id": 1, "position_embedding_type": "rotary",
            "token_dropout": True, "torch_dtype": "float32", "use_cache": True, "vocab_list": None, "vocab_size": 33,
        },
        EsmConfig(
            vocab_size=33, hidden_size=320, num_layers=6, num_heads=20, intermediate_size=1280, mask_id=32,
            token_dropout=True,
        ),
    ),
    "deberta-v3-base": (OF_V3, DebertaConfig()),
    "deberta-v3-small": (OF_V3 | {"num_hidden_layers": 6}, DebertaConfig(num_layers=6)),
    "deberta-v3-xsmall": (
        OF_V3 | {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536},
        DebertaConfig(hidden_size=384, num_heads=6, intermediate_size=1536),
    ),
    "deberta-base": (  # as many distances as positions
        {key: value for key, value in OF_V3.items() if key not in ("position_buckets", "norm_rel_ebd", "share_att_key")}
        | {"model_type": "deberta", "vocab_size": 50265, "pos_att_type": "c2p|p2c"},
        DebertaConfig(version="v1", vocab_size=50265, buckets=512),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_configs_of_the_released_models_are_read(name: str, tmp_path: Path, cli: Cli) -> None:
    """As published, with keys of their time."""
    raw, expected = RELEASED[name]
    said = read(raw, "file")
    assert said.model == expected and not said.detects
    permutes = isinstance(expected, XLNetConfig)
    assert said.order == ("given" if permutes else "all")
    assert said.max_tokens == (1026 if isinstance(expected, EsmConfig) else 512)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ours = yaml.safe_load(cli("init", "from", tmp_path / "config.json").out)
    assert type(expected)(**ours["model"]) == expected
    assert ours["objective"] == {"name": "permutation" if permutes else "mlm"}


def test_the_configs_of_released_models_are_read() -> None:
    """Of meta-llama/Llama-3.2-1B, Qwen/Qwen3-0.6B and google/gemma-3-270m, as transformers 4 wrote them."""
    llama32 = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 131072,
        "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True,
        "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "vocab_size": 128256,
    }  # fmt: skip
    found = read(llama32, "config.json")
    assert planned.count_parameters(found.model).total == 1_235_814_400 and found.order == "causal"
    qwen3 = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960,
        "max_window_layers": 28, "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
        "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
    }  # fmt: skip
    assert planned.count_parameters(read(qwen3, "config.json").model).total == 596_049_920
    gemma3 = {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "_sliding_window_pattern": 6,
        "attention_bias": False, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 640,
        "intermediate_size": 2048, "num_attention_heads": 4, "num_hidden_layers": 18, "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0, "rope_scaling": None,
        "rope_theta": 1000000.0, "sliding_window": 512, "use_bidirectional_attention": False, "vocab_size": 262144,
    }  # fmt: skip
    assert planned.count_parameters(read(gemma3, "config.json").model).total == 268_098_176
