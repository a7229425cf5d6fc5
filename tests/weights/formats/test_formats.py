"""Formats as a whole: which models are exported as what, and ModernBERT's decoder compared with transformers'.

If this breaks, a model trained in causal order is published as one that computes something else.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers

from modernbert_train.config.schema import (
    BertConfig,
    DebertaConfig,
    LlamaConfig,
    ModelConfig,
    ModernBertConfig,
    SentenceOrderConfig,
    XLNetConfig,
)
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.models.build import all_shapes, build_model, shapes_of
from modernbert_train.models.init import initialize
from modernbert_train.weights.formats import (
    CLASSES,
    DISCRIMINATORS,
    EXPORTS,
    FORMATS,
    export_format,
    modernbert,
    modernbert_tokens,
    read,
)
from modernbert_train.weights.formats.classifiers import KINDS
from modernbert_train.weights.formats.tensors import from_hf, heads_among, places_of, to_hf, unsupported_heads
from tests.support.encoders import ENCODERS, LLAMAS, ROBERTA

MODELS: dict[str, ModelConfig] = ENCODERS | {"roberta": ROBERTA} | {name: LLAMAS[name] for name in ("untied", "qwen3")}
DECODERS = (ModernBertConfig, BertConfig, XLNetConfig, LlamaConfig)  # architectures with a decoder in transformers
ORDERS: list[tuple[ModelConfig, Any]] = [
    *(
        (config, order)
        for config in MODELS.values()
        for order in ("all", "causal")
        if order == "all" or isinstance(config, DECODERS)
    ),
    *((config, "given") for config in MODELS.values()),  # as for models that see all
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
    of_tokens = set() if isinstance(config, DebertaConfig) else {"token_head"}
    of_pairs = set() if config.model_type in ("bert", "albert") else {"pair_head"}
    assert lost == of_tokens | of_pairs
    assert {*shapes_of(config, SentenceOrderConfig())} == {each for each in shapes if not each.startswith("token_head")}


@pytest.mark.parametrize("name", ["modernbert", "bert"])
def test_a_head_that_detects_replaced_tokens_has_a_place_of_its_own(name: str) -> None:
    """The head has a separate format; only a generator's predictions of tokens have a place there."""
    config = MODELS[name]
    hub = export_format(config, "all", {"model", "token_head"})
    shapes = [name for name in all_shapes(config) if name.startswith(("model.", "token_head."))]
    places = [name for ours in shapes for parts in places_of(hub, ours, config) for name in parts]
    assert len(set(places)) == len(places) >= len(shapes)
    assert [name for name in places if hub.today(name) != name] == []


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
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


def test_an_untied_decoder_is_not_exported() -> None:
    config = MODELS["modernbert"]
    weights = dict(build_model(config, SentenceOrderConfig()).state_dict())
    weights["decoder.weight"] = weights["decoder.weight"] + 1
    with pytest.raises(ConfigError, match=r"decoder\.weight is not tied"):
        to_hf(modernbert.FORMAT, weights, config)


def test_scaled_positions_of_local_layers_alone_are_refused_and_layer_types_win() -> None:
    """If the scaling were ignored, a Gemma 3 would compute its local layers differently from transformers."""
    raw = json.loads(transformers.CONFIG_MAPPING["gemma3_text"]().to_json_string(use_diff=False))
    scaled = {"rope_type": "linear", "factor": 8.0, "rope_theta": 10_000.0}
    with pytest.raises(DataError, match="local layers are scaled as global ones here"):
        read(raw | {"rope_parameters": raw["rope_parameters"] | {"sliding_attention": scaled}}, "x")
    types = ["sliding_attention", "full_attention"] * 13
    assert read(raw | {"layer_types": types, "_sliding_window_pattern": 6}, "x").model.global_every == 2
