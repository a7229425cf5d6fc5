"""ALBERT as transformers names and describes it.

transformers stores groups of whole layers, either shared whole or not at all. A model that shares only attentions or
feed-forwards is written as one group per layer, with the shared tensors in each of them. Read again, it shares nothing
until a run with `sharing` starts from it, which joins the equal tensors (`AlbertConfig.stored`). Query, key and value
are one matrix here and three in transformers. Both conversions are exact.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from modernbert_train.config.albert import AlbertConfig
from modernbert_train.config.model import MAX_LAYERS
from modernbert_train.config.objective import Order
from modernbert_train.errors import DataError
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats import bert
from modernbert_train.weights.formats.config_json import PAIR_HEAD, Content
from modernbert_train.weights.formats.table_format import SPECIAL, places

# module of a unit here -> in a layer of transformers
_ATTENTION: dict[str, tuple[str, ...]] = {
    "Wqkv": ("attention.query", "attention.key", "attention.value"),
    "Wo": ("attention.dense",),
    "norm": ("attention.LayerNorm",),
}
_FFN: dict[str, tuple[str, ...]] = {"Wi": ("ffn",), "Wo": ("ffn_output",), "norm": ("full_layer_layer_norm",)}
_OUTSIDE = bert.EMBEDDINGS | {
    "model.projection": "encoder.embedding_hidden_mapping_in",
    "head.dense": "predictions.dense",
    "head.norm": "predictions.LayerNorm",
    "decoder": "predictions",
    f"{PAIR_HEAD}.dense": "albert.pooler",
    f"{PAIR_HEAD}.classifier": "sop_classifier.classifier",
}


def _names(name: str, config: AlbertConfig) -> tuple[str, ...]:
    """See `HubFormat.theirs`; for a configuration that shares whole layers."""
    if not name.startswith("model.layers."):
        prefix = "albert." if name.startswith("model.") else ""
        return tuple(prefix + each for each in places(name, "", {}, _OUTSIDE))
    module, _, end = name.removeprefix("model.layers.").rpartition(".")
    number, _, part = module.partition(".")
    names, layer, attentions = _ATTENTION, int(number), len(config.passes("attention"))
    if layer >= attentions:
        names, layer = _FFN, layer - attentions
    group, position = divmod(layer, config.group_layers)
    return tuple(
        f"albert.encoder.albert_layer_groups.{group}.albert_layers.{position}.{each}.{end}" for each in names[part]
    )


def _more(config: AlbertConfig, order: Order, vocabulary: Vocabulary) -> dict[str, Any]:
    stored = config.stored
    return {
        "num_hidden_layers": stored.num_layers // stored.group_layers,
        "num_hidden_groups": stored.groups,
        "inner_group_num": stored.group_layers,
    }


def _build(raw: Content, fields: dict[str, Any], order: Order, longest: int) -> tuple[AlbertConfig, Order]:
    layers, groups, inner = (
        int(raw.number(key, default, maximum=MAX_LAYERS))
        for key, default in {"num_hidden_layers": 12, "num_hidden_groups": 1, "inner_group_num": 1}.items()
    )
    if layers % groups:
        raise DataError(
            f"{raw.where}: num_hidden_layers={layers} is not a multiple of num_hidden_groups={groups}; this encoder "
            "only knows groups of equal length. Name another model."
        )
    if layers * inner > MAX_LAYERS:
        raise DataError(
            f"{raw.where}: num_hidden_layers={layers} times inner_group_num={inner} is above {MAX_LAYERS:,}. Restore "
            "the file from a copy."
        )
    own = groups == layers > 1 and inner == 1  # no two layers share anything
    sharing: dict[str, Any] = {"sharing": "none" if own else "all", "groups": 1 if own else groups}
    return AlbertConfig(**fields, **sharing, num_layers=layers * inner, group_layers=inner), order


FORMAT = replace(
    bert.FORMAT,
    config=AlbertConfig,
    model_type="albert",
    classes={"all": "AlbertForMaskedLM"},
    for_heads={PAIR_HEAD: "AlbertForPreTraining"},
    keys={
        "vocab_size": "vocab_size",
        "embedding_size": "embedding_size",
        "hidden_size": "hidden_size",
        "num_heads": "num_attention_heads",
        "intermediate_size": "intermediate_size",
        "max_positions": "max_position_embeddings",
        "segments": "type_vocab_size",
        "norm_eps": "layer_norm_eps",
        "init_std": "initializer_range",
    },
    special=SPECIAL,
    fixed={"tie_word_embeddings": True, "position_embedding_type": "absolute"},
    # xxlarge's
    defaults={
        "hidden_size": 4096, "num_attention_heads": 64, "intermediate_size": 16384, "hidden_act": "gelu_new",
        "hidden_dropout_prob": 0.0,
    },
    names=_names,
    outside=_OUTSIDE,
    prefix="albert.",
    more=_more,
    build=_build,
)  # fmt: skip
