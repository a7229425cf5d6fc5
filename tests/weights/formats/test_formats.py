"""Formats as a whole: which models are exported as what, and ModernBERT's decoder compared with transformers'.

If this breaks, a model trained in causal order is published as one that computes something else.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from benchmarks.batches import lay_out
from modernbert_train.config.schema import (
    AlbertConfig,
    BertConfig,
    DebertaConfig,
    DistilBertConfig,
    EsmConfig,
    LlamaConfig,
    ModelConfig,
    ModernBertConfig,
    NeoBertConfig,
    SentenceOrderConfig,
    XLNetConfig,
)
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.models.build import all_shapes, build_model, shapes_of
from modernbert_train.models.init import initialize
from modernbert_train.models.modernbert import ModernBertForMaskedLM
from modernbert_train.weights.formats import (
    CLASSES,
    DISCRIMINATORS,
    EXPORTS,
    FORMATS,
    export_format,
    format_of,
    modernbert,
    modernbert_tokens,
    read,
    read_folder,
)
from modernbert_train.weights.formats.classifiers import KINDS
from modernbert_train.weights.formats.tensors import from_hf, heads_among, places_of, to_hf, unsupported_heads
from modernbert_train.weights.hf_folder import load_weights
from tests.support.exported import CONFIG, edit, write

# window of 8: local layers see a token and 3 before it; the longest sequence is many times longer
BOUNDARIES = [0, 3, 70, 71, 160]


@pytest.fixture
def decoder(model: ModernBertForMaskedLM, tokenizer_folder: Path, tmp_path: Path) -> Path:
    return write(model, tokenizer_folder, tmp_path / "hf", order="causal")


def our_logits(model: ModernBertForMaskedLM, ids_T: Tensor) -> Tensor:
    model.set_phase(CONFIG)
    with torch.no_grad():
        hidden_TD = model.encode(lay_out(ids_T, BOUNDARIES, order="causal"))
        return model.logits(hidden_TD, torch.arange(len(ids_T)))


@pytest.mark.runs
def test_the_decoder_computes_the_same_in_transformers(model: ModernBertForMaskedLM, decoder: Path) -> None:
    """Sequences in one packed buffer here, one by one there; both kinds of layers, and longer than the window."""
    twin, report = transformers.AutoModelForCausalLM.from_pretrained(decoder, output_loading_info=True)
    assert isinstance(twin, transformers.ModernBertDecoderForCausalLM)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert {*twin.config.layer_types} == {"full_attention", "sliding_attention"} and twin.config.sliding_window == 4
    assert twin.config.rope_parameters["sliding_attention"]["rope_theta"] == 5_000.0
    ids_T = torch.randint(0, 8, (160,), generator=torch.Generator().manual_seed(0))
    logits_TV = our_logits(model, ids_T)
    with torch.no_grad():
        for start, end in itertools.pairwise(BOUNDARIES):
            theirs = twin.eval()(ids_T[None, start:end]).logits[0]
            torch.testing.assert_close(theirs, logits_TV[start:end], atol=1e-5, rtol=0)


def test_one_more_token_in_the_window_is_another_model(model: ModernBertForMaskedLM, decoder: Path) -> None:
    """Ettin's training saw one token more than transformers does; this shows that the test above would notice."""
    edit(decoder, sliding_window=5, local_attention=10)
    twin = transformers.AutoModelForCausalLM.from_pretrained(decoder).eval()
    ids_T = torch.randint(0, 8, (160,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = twin(ids_T[None, 71:]).logits[0]
    assert (theirs - our_logits(model, ids_T)[71:]).abs().max() > 1e-2


@pytest.mark.runs
def test_a_decoder_comes_back_bit_by_bit(model: ModernBertForMaskedLM, decoder: Path, tmp_path: Path) -> None:
    """From our file and from transformers', including its kind."""
    transformers.AutoModelForCausalLM.from_pretrained(decoder).save_pretrained(tmp_path / "theirs")
    original = model.state_dict()
    for folder in (decoder, tmp_path / "theirs"):
        said = read_folder(folder)
        assert (said.model, said.order, said.max_tokens) == (CONFIG, "causal", 512)
        weights = load_weights(folder)
        assert weights.keys() == original.keys()
        assert all(torch.equal(weights[name], original[name]) for name in original)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["ModernBertDecoderForSequenceClassification"]}, "only model_type=modernbert-decoder"),
        ({"local_attention": None}, "local_attention=None; this encoder has local layers"),
        ({"sliding_window": 5}, "sliding_window=5; with local_attention=8 this encoder only knows 4"),
        ({"decoder_bias": False}, "decoder_bias=False"),
        ({"model_type": "gpt2"}, "model_type='gpt2'; only model_type=modernbert, modernbert-decoder, bert, roberta"),
        ({"model_type": ["bert"]}, r"model_type=\['bert'\]; only"),
    ],
)
def test_another_decoder_is_refused(decoder: Path, changes: dict[str, Any], message: str) -> None:
    edit(decoder, **changes)
    with pytest.raises(DataError, match=message) as error:
        read_folder(decoder)
    assert str(error.value).startswith(f"{decoder}/config.json: ")


SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_layers": 3, "num_heads": 2, "intermediate_size": 48
}  # fmt: skip
MODELS: list[ModelConfig] = [
    ModernBertConfig(**SHAPE, local_attention=8),
    BertConfig(**SHAPE, max_positions=40),
    BertConfig(**SHAPE, max_positions=40, segments=1, position_offset=2),
    AlbertConfig(**SHAPE, embedding_size=16, max_positions=40, groups=3),
    AlbertConfig(**SHAPE, embedding_size=16, max_positions=40, sharing="ffn"),
    XLNetConfig(**SHAPE),
    DebertaConfig(**SHAPE, buckets=8, max_distance=16),
    LlamaConfig(**SHAPE, tied=False, qk_norm=True),
    DistilBertConfig(**SHAPE, max_positions=40),
    NeoBertConfig(**SHAPE),
    EsmConfig(**SHAPE),
]
NAMES = ["modernbert", "bert", "roberta", "albert", "albert that shares its ffn", "xlnet", "deberta", "llama"]
NAMES += ["distilbert", "neobert", "esm"]
DECODERS = (ModernBertConfig, BertConfig, XLNetConfig, LlamaConfig)  # architectures with a decoder in transformers
ORDERS: list[tuple[ModelConfig, Any]] = [
    *(
        (config, order)
        for config in MODELS
        for order in ("all", "causal")
        if order == "all" or isinstance(config, DECODERS)
    ),
    *((config, "given") for config in MODELS),  # as for models that see all
]


@pytest.mark.parametrize(("config", "order"), ORDERS)
def test_every_parameter_has_a_place_of_its_own(config: ModelConfig, order: Any) -> None:
    """For every encoder with every head: two with one name would overwrite each other, a nameless one would be lost."""
    hub = export_format(config, order)
    shapes = all_shapes(config)
    places = [name for ours in shapes for parts in places_of(hub, ours, config) for name in parts]
    assert len(set(places)) == len(places)
    assert [name for name in places if hub.today(name) != name] == []
    lost = {ours.partition(".")[0] for ours in shapes if not places_of(hub, ours, config)}
    of_tokens = {"token_head"} if config != MODELS[6] else set()
    of_pairs = {"pair_head"} if config in (MODELS[0], MODELS[2], *MODELS[5:]) else set()
    assert lost == of_tokens | of_pairs
    assert {*shapes_of(config, SentenceOrderConfig())} == {each for each in shapes if not each.startswith("token_head")}


@pytest.mark.parametrize("config", MODELS[:2], ids=["modernbert", "bert"])
def test_a_head_that_detects_replaced_tokens_has_a_place_of_its_own(config: ModelConfig) -> None:
    """The head has a separate format; only a generator's predictions of tokens have a place there."""
    hub = export_format(config, "all", {"model", "token_head"})
    shapes = [name for name in all_shapes(config) if name.startswith(("model.", "token_head."))]
    places = [name for ours in shapes for parts in places_of(hub, ours, config) for name in parts]
    assert len(set(places)) == len(places) >= len(shapes)
    assert [name for name in places if hub.today(name) != name] == []


@pytest.mark.parametrize("config", MODELS, ids=NAMES)
def test_a_pair_head_is_kept_where_it_has_a_place(config: ModelConfig) -> None:
    model = build_model(config, SentenceOrderConfig())
    initialize(model, config, seed=3)
    weights = model.state_dict()
    hub = export_format(config, "all")
    back = from_hf(hub, to_hf(hub, weights, config), config, "file")
    kept = () if unsupported_heads(hub, weights, config) else ("pair_head",)
    assert heads_among(back) == kept
    assert all(torch.equal(tensor, weights[name]) for name, tensor in back.items())


def test_tables_are_of_one_another() -> None:
    """Every model that can be exported can be read again."""
    written = {export_format(config, order) for config, order in ORDERS} | {*EXPORTS.values()}
    assert written | {*DISCRIMINATORS.values()} <= {*FORMATS.values(), modernbert_tokens.FORMAT}
    assert (
        {*CLASSES} == {*KINDS} > {modernbert_tokens.ARCHITECTURE}
    )  # which classes are exported: tests/evaluate/finetune


def test_weights_for_which_there_is_no_format_are_not_exported() -> None:
    class Toy(ModelConfig):
        pass

    with pytest.raises(ConfigError, match=r"model\.name=toy: transformers lacks such a model"):
        export_format(Toy(name="toy", **SHAPE, norm_eps=1e-5, init_std=0.02, init_cutoff=2.0), "all")


def test_an_untied_decoder_is_not_exported() -> None:
    config = MODELS[0]
    weights = dict(build_model(config, SentenceOrderConfig()).state_dict())
    weights["decoder.weight"] = weights["decoder.weight"] + 1
    with pytest.raises(ConfigError, match=r"decoder\.weight is not tied"):
        to_hf(modernbert.FORMAT, weights, config)


@pytest.mark.parametrize("kind", [*FORMATS])
def test_what_a_config_json_leaves_out_is_what_transformers_fills_in(kind: str) -> None:
    """Older files omit defaults; our norm's eps instead of transformers' would change every output."""
    if kind == "neobert":
        pytest.skip("transformers has no such class")
    given = {"model_type": kind, "architectures": None}
    given |= {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]} if kind.startswith("deberta") else {}
    given |= {"position_biased_input": False, "type_vocab_size": 0} if kind.startswith("deberta") else {}
    given |= (
        {"share_att_key": True, "norm_rel_ebd": "layer_norm", "position_buckets": 256} if kind == "deberta-v2" else {}
    )
    given |= {"embedding_size": 256} if kind == "electra" else {}
    given |= {"position_embedding_type": "rotary"} if kind == "esm" else {}
    if kind == "modernbert-decoder":
        given["architectures"] = ["ModernBertDecoderForCausalLM"]
    their = transformers.CONFIG_MAPPING[kind](**{key: value for key, value in given.items() if key != "model_type"})
    filled = json.loads(their.to_json_string(use_diff=False)) | given
    assert format_of(given, "x").read(given, "x") == format_of(filled, "x").read(filled, "x")


def test_scaled_positions_of_local_layers_alone_are_refused_and_layer_types_win() -> None:
    """If the scaling were ignored, a Gemma 3 would compute its local layers differently from transformers."""
    raw = json.loads(transformers.CONFIG_MAPPING["gemma3_text"]().to_json_string(use_diff=False))
    scaled = {"rope_type": "linear", "factor": 8.0, "rope_theta": 10_000.0}
    with pytest.raises(DataError, match="local layers are scaled as global ones here"):
        read(raw | {"rope_parameters": raw["rope_parameters"] | {"sliding_attention": scaled}}, "x")
    types = ["sliding_attention", "full_attention"] * 13
    assert read(raw | {"layer_types": types, "_sliding_window_pattern": 6}, "x").model.global_every == 2
