"""Every kind of model as transformers writes it. A single lost bit silently makes another model."""

from __future__ import annotations

import contextlib
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.batches import lay_out
from modernbert_train.config.objective import Order
from modernbert_train.config.schema import (
    AlbertConfig,
    BertConfig,
    ComputeConfig,
    MaskedLmConfig,
    ModelConfig,
    ModernBertConfig,
    PermutationLmConfig,
    XLNetConfig,
)
from modernbert_train.errors import DataError
from modernbert_train.models.build import build_model
from modernbert_train.weights.formats import export_format, read, read_folder
from modernbert_train.weights.formats.tensors import from_hf
from modernbert_train.weights.hf_folder import load_weights
from tests.support.encoders import ENCODERS, ESM, LLAMAS, MODERNBERT
from tests.weights.formats.models import (
    ALBERT,
    BERT,
    DEBERTA,
    ROBERTA,
    SAID,
    UNSAID,
    XLNET,
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
GROUP_0, GROUP_1 = (f"albert.encoder.albert_layer_groups.{group}.albert_layers.0." for group in range(2))
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
    ids_T = torch.randint(5, 64, (40,), generator=torch.Generator().manual_seed(0))
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
    assert written["architectures"] == [kind]
    alone = {name: tensor for name, tensor in weights.items() if not name.startswith("pair_head")}
    build_model(config, PermutationLmConfig()).load_state_dict(alone, strict=True)
    # an incomplete head is ignored: a masked-LM model may be stored with a pooler that it does not use
    half = {name: tensor for name, tensor in found.items() if "seq_relationship" not in name and "sop" not in name}
    assert_equal(read_tensors(half, config), alone)


@pytest.mark.parametrize(
    ("config", "start", "head"), [(BERT, "bert", "cls.predictions"), (ALBERT, "albert", "predictions")]
)
def test_old_files_are_read(config: ModelConfig, start: str, head: str) -> None:
    """TensorFlow's names of norms, buffers as tensors, a duplicate decoder, pooler and pair head."""
    weights = weights_with_pairs(config)
    today = stored(config, weights)
    names = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")) if start == "bert" else ()
    old = dict(today)
    for new, before in names:
        old = {name.replace(new, before): tensor for name, tensor in old.items()}
    old[f"{start}.embeddings.position_ids"] = torch.arange(40)
    old[f"{head}.decoder.weight"] = today[f"{start}.embeddings.word_embeddings.weight"]
    old[f"{head}.decoder.bias"] = old.pop(f"{head}.bias")
    assert_equal(read_tensors(old, config), weights)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (BERT, {"cls.predictions.bias": None}, r"1 of 42 tensors are missing, the first is cls\.predictions\.bias"),
        (
            BERT,
            {"bert.encoder.layer.2.output.dense.bias": torch.ones(32)},
            r"unknown, the first is bert\.encoder\.layer\.2",
        ),
        (
            BERT,
            {"bert.encoder.layer.0.attention.self.query.weight": torch.ones(16, 32)},
            r"self\.query\.weight has the shape \(16, 32\) and not \(32, 32\)",
        ),
        (
            BERT,
            {"cls.predictions.bias": torch.ones(64, dtype=torch.int64)},
            r"cls\.predictions\.bias is of type torch\.int64",
        ),
        (
            BERT,
            {"cls.predictions.decoder.weight": torch.ones(64, 32)},
            r"decoder\.weight is not tied to bert\.embeddings",
        ),
        (
            BERT,
            {"cls.predictions.decoder.bias": torch.ones(64)},
            r"decoder\.bias is not tied to cls\.predictions\.bias",
        ),
        (ALBERT, {GROUP_1 + "ffn.bias": torch.ones(48)}, r"unknown, the first is albert\.encoder\.albert_layer_gr"),
        (
            ALBERT,
            {"predictions.decoder.weight": torch.ones(64, 16)},
            r"decoder\.weight is not tied to albert\.embeddings",
        ),
        (XLNET, {"transformer.mask_emb": torch.ones(1, 32)}, r"mask_emb has the shape \(1, 32\) and not \(1, 1, 32\)"),
        (XLNET, {"lm_loss.weight": torch.ones(64, 32)}, r"lm_loss\.weight is not tied"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    config: ModelConfig, changes: dict[str, Tensor | None], message: str
) -> None:
    """By their names in the file, where the user can look."""
    found = stored(config, weights_of(config)) | changes
    with pytest.raises(DataError, match=f"^weights.bin: .*{message}.*Name weights that fit"):
        read_tensors({name: tensor for name, tensor in found.items() if tensor is not None}, config, "weights.bin")


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (BERT, {"model_type": "albert"}, "model_type='albert'"),
        (BERT, {"architectures": None}, "architectures=None"),
        (BERT, {"model_type": "roberta"}, "model_type='roberta', architectures="),
        (BERT, {"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        (ROBERTA, {"position_embedding_type": "relative_key_query"}, "position_embedding_type='relative_key_query'"),
        (BERT, {"is_decoder": True}, "is_decoder=True"),
        (BERT, {"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        (BERT, {"pruned_heads": {"0": [1]}}, "pruned_heads="),
        (BERT, {"hidden_act": "relu"}, "hidden_act='relu'"),
        (ROBERTA, {"hidden_act": "gelu_new"}, "hidden_act='gelu_new'; this encoder only knows gelu"),
        (BERT, {"hidden_size": "32"}, "hidden_size='32', not a whole number above 0"),
        (BERT, {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000, not a whole number"),
        (BERT, {"layer_norm_eps": float("nan")}, "layer_norm_eps=nan"),
        (BERT, {"hidden_dropout_prob": 1}, "hidden_dropout_prob=1, not a number from 0.0"),
        (BERT, {"num_attention_heads": 3}, "hidden_size=32 is not a multiple of num_attention_heads=3"),
        (ROBERTA, {"max_position_embeddings": 2}, "max_position_embeddings=2, not a whole number from 3"),
        (ROBERTA, {"pad_token_id": -1}, "pad_token_id=-1"),
        (ALBERT, {"architectures": ["AlbertForSequenceClassification"]}, "AlbertForSequenceClassification"),
        (ALBERT, {"num_hidden_groups": 3}, "num_hidden_layers=4 is not a multiple of num_hidden_groups=3"),
        (ALBERT, {"inner_group_num": 999}, "num_hidden_layers=4 times inner_group_num=999 is above 1,000"),
        (XLNET, {"architectures": ["XLNetForSequenceClassification"]}, "only model_type=xlnet, architectures="),
        (XLNET, {"untie_r": False}, "untie_r=False; this encoder only knows True"),
        (XLNET, {"bi_data": True}, "bi_data=True"),
        (XLNET, {"clamp_len": 400}, "clamp_len=400"),
        (XLNET, {"attn_type": "both"}, "attn_type='both'; this encoder only knows bi, uni"),
        (XLNET, {"d_model": 33}, "d_model=33 is not a multiple of n_head=4"),
        (XLNET, {"d_head": 16}, "d_head=16; with d_model=32 and n_head=4 this encoder only knows 8"),
        (
            DEBERTA,
            {"architectures": ["DebertaV2ForQuestionAnswering"]},
            r"only model_type=deberta-v2, architectures=\['DebertaV2ForMaskedLM'\] or",
        ),
        (DEBERTA, {"conv_kernel_size": 3, "conv_act": "tanh"}, "conv_act='tanh', conv_groups=None; this encoder"),
        (DEBERTA, {"share_att_key": False}, "share_att_key=False"),
        (DEBERTA, {"norm_rel_ebd": None}, "norm_rel_ebd='none'"),
        (DEBERTA, {"position_biased_input": None}, "position_biased_input=True"),
        (DEBERTA, {"relative_attention": False}, "relative_attention=False"),
        (DEBERTA, {"type_vocab_size": 2}, "type_vocab_size=2"),
        (DEBERTA, {"pos_att_type": "c2p"}, "pos_att_type='c2p'; this encoder only knows both of c2p, p2c"),
        (DEBERTA, {"position_buckets": None}, "position_buckets=-1, not a whole number from 2"),
        (
            DEBERTA,
            {"position_buckets": 256, "max_relative_positions": 100},
            r"max_distance=100 with model\.buckets=256",
        ),
        (DEBERTA, {"hidden_act": "relu"}, "hidden_act='relu'"),
        (DEBERTA, {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
        (
            DEBERTA,
            {"hidden_size": 33, "embedding_size": None},
            "hidden_size=33 is not a multiple of num_attention_heads=4",
        ),
        (DEBERTA, {"attention_head_size": 16}, "attention_head_size=16"),
    ],
)
def test_another_architecture_is_refused(config: ModelConfig, changes: dict[str, Any], message: str) -> None:
    """Its weights might even load, with another meaning."""
    with pytest.raises(DataError, match=f"^there: .*{message}"):
        export_format(config, "all").read(describe(config) | changes, "there")


WINDOWED = ModernBertConfig(vocab_size=64, hidden_size=32, num_layers=3, num_heads=2, intermediate_size=48)


@pytest.mark.parametrize("odd", [None, [], "x", -1, float("nan"), 10**30], ids=repr)
@pytest.mark.parametrize(
    ("config", "order"),
    [(BERT, "all"), (ROBERTA, "all"), (ALBERT, "all"), (XLNET, "all"), (DEBERTA, "all"), (WINDOWED, "causal")],
    ids=["bert", "roberta", "albert", "xlnet", "deberta", "modernbert's decoder"],
)
def test_no_value_of_any_key_ends_in_a_traceback(config: ModelConfig, order: Order, odd: Any) -> None:
    """Any value in a downloaded file is accepted or refused."""
    described = describe(config, order)
    for key in described:
        with contextlib.suppress(DataError):
            assert isinstance(export_format(config, order).read(described | {key: odd}, "there").model, type(config))


BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
COMMON = {"hidden_act": "gelu", "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, **BASE}
OF_ALBERT = {
    **COMMON, "model_type": "albert", "architectures": ["AlbertForMaskedLM"], "embedding_size": 128, "gap_size": 0,
    "inner_group_num": 1, "num_hidden_groups": 1, "net_structure_type": 0, "num_memory_blocks": 0, "vocab_size": 30000,
    "down_scale_factor": 1, "type_vocab_size": 2, "max_position_embeddings": 512, "layer_norm_eps": 1e-12,
}  # fmt: skip
V2 = {"hidden_act": "gelu_new", "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
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
    # old files omit most keys; each class has its defaults
    "bert that says nothing": ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, BertConfig()),
    "roberta that says nothing": (
        {"model_type": "roberta", "architectures": ["RobertaForMaskedLM"]},
        BertConfig(vocab_size=50265, max_positions=510, position_offset=2),
    ),
    "albert that says nothing": (
        {"model_type": "albert", "architectures": ["AlbertForMaskedLM"]},
        AlbertConfig(hidden_size=4096, num_heads=64, intermediate_size=16384),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_configs_of_the_released_models_are_read(name: str) -> None:
    """As published, with keys of their time."""
    raw, expected = RELEASED[name]
    said = read(raw, "file")
    assert said.model == expected
    assert said.order == ("given" if isinstance(expected, XLNetConfig) else "all")
