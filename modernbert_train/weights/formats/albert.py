"""ALBERT as transformers names and describes it.

transformers stores groups of whole layers, either shared whole or not at all. A model that shares only attentions or
feed-forwards is written as one group per layer, with the shared tensors in each of them. Read again, it shares nothing
until a run with `sharing` starts from it, which joins the equal tensors (`AlbertConfig.stored`). Query, key and value
are one matrix here and three in transformers. Both conversions are exact.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from modernbert_train.config.albert import AlbertConfig
from modernbert_train.config.model import MAX_LAYERS
from modernbert_train.config.objective import Order
from modernbert_train.errors import DataError
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats.config_json import (
    ACTIVATIONS,
    PAIR_HEAD,
    Described,
    activation_name,
    head_of,
    number_under,
    numbers_under,
    one_of,
    require_class,
    require_fixed,
    require_whole_heads,
    share_under,
)

MODEL_TYPE = "albert"
ARCHITECTURES = ("AlbertForMaskedLM", "AlbertForPreTraining")  # the second is written if there is a head for pairs

# Options of transformers' configuration, with the only value that this encoder implements.
FIXED = {"tie_word_embeddings": True, "position_embedding_type": "absolute"}

# AlbertConfig -> config.json, for keys with one number.
KEYS = {
    "vocab_size": "vocab_size",
    "embedding_size": "embedding_size",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "segments": "type_vocab_size",
    "norm_eps": "layer_norm_eps",
    "init_std": "initializer_range",
}
# transformers' defaults where they differ from this program's; xxlarge's
_DEFAULTS = {"hidden_size": 4096, "num_attention_heads": 64, "intermediate_size": 16384}


# module of a unit here -> in a layer of transformers
_ATTENTION: dict[str, tuple[str, ...]] = {
    "Wqkv": ("attention.query", "attention.key", "attention.value"),
    "Wo": ("attention.dense",),
    "norm": ("attention.LayerNorm",),
}
_FFN: dict[str, tuple[str, ...]] = {"Wi": ("ffn",), "Wo": ("ffn_output",), "norm": ("full_layer_layer_norm",)}
# other modules; the decoder's bias is stored under `predictions`, its matrix is tied
_OTHERS = {
    "model.embeddings.tok_embeddings": "albert.embeddings.word_embeddings",
    "model.embeddings.segment_embeddings": "albert.embeddings.token_type_embeddings",
    "model.embeddings.position_embeddings": "albert.embeddings.position_embeddings",
    "model.embeddings.norm": "albert.embeddings.LayerNorm",
    "model.projection": "albert.encoder.embedding_hidden_mapping_in",
    "head.dense": "predictions.dense",
    "head.norm": "predictions.LayerNorm",
    "decoder": "predictions",
    f"{PAIR_HEAD}.dense": "albert.pooler",
    f"{PAIR_HEAD}.classifier": "sop_classifier.classifier",
}
_COPIES = {
    "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
    "predictions.decoder.bias": "predictions.bias",
}
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")  # in files of older versions; not weights


def theirs(name: str, config: AlbertConfig) -> tuple[str, ...]:
    """See `HubFormat`; for a configuration that shares whole layers."""
    module, _, end = name.rpartition(".")
    if not module.startswith("model.layers."):
        return (f"{_OTHERS[module]}.{end}",) if module in _OTHERS else ()
    number, _, part = module.removeprefix("model.layers.").partition(".")
    names, layer, attentions = _ATTENTION, int(number), len(config.passes("attention"))
    if layer >= attentions:
        names, layer = _FFN, layer - attentions
    group, place = divmod(layer, config.group_layers)
    return tuple(
        f"albert.encoder.albert_layer_groups.{group}.albert_layers.{place}.{each}.{end}" for each in names[part]
    )


def today(name: str) -> str | None:
    """See `HubFormat`."""
    return None if name.endswith(_BUFFERS) else _COPIES.get(name, name)


def describe(
    config: AlbertConfig, order: Order, modules: Collection[str], max_tokens: int, vocabulary: Vocabulary
) -> dict[str, Any]:
    """See `HubFormat`. The longest sequence is the number of position vectors."""
    stored = config.stored
    return {
        **head_of(ARCHITECTURES[PAIR_HEAD in modules], MODEL_TYPE, config, KEYS, FIXED),
        "num_hidden_layers": stored.num_layers // stored.group_layers,
        "num_hidden_groups": stored.groups,
        "inner_group_num": stored.group_layers,
        "hidden_act": activation_name(config.activation),
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": vocabulary.pad_id,
        "bos_token_id": vocabulary.cls_id,
        "eos_token_id": vocabulary.sep_id,
    }


def read(raw: dict[str, Any], where: str) -> Described:
    """See `HubFormat`. Dropout of attention probabilities is ignored: it only concerns training, and this encoder lacks
    it.
    """
    require_class(raw, where, MODEL_TYPE, *ARCHITECTURES)
    require_fixed(raw, FIXED, where)
    activation = one_of(raw, "hidden_act", "gelu_new", ACTIVATIONS, where)
    raw = _DEFAULTS | {key: value for key, value in raw.items() if value is not None}
    layers, groups, inner = (
        int(number_under(raw, key, default, where, most=MAX_LAYERS))
        for key, default in {"num_hidden_layers": 12, "num_hidden_groups": 1, "inner_group_num": 1}.items()
    )
    if layers % groups:
        raise DataError(
            f"{where}: num_hidden_layers={layers} is not a multiple of num_hidden_groups={groups}; this encoder only "
            "knows groups of equal length. Name another model."
        )
    if layers * inner > MAX_LAYERS:
        raise DataError(
            f"{where}: num_hidden_layers={layers} times inner_group_num={inner} is above {MAX_LAYERS:,}. Restore the "
            "file from a copy."
        )
    own = groups == layers > 1 and inner == 1  # no two layers share anything
    config = AlbertConfig(
        **numbers_under(raw, KEYS, AlbertConfig, where),
        num_layers=layers * inner,
        sharing="none" if own else "all",
        groups=1 if own else groups,
        group_layers=inner,
        activation=ACTIVATIONS[activation],
        dropout=share_under(raw, "hidden_dropout_prob", 0.0, where),
    )
    require_whole_heads(config, where)
    return Described(config, config.max_positions, "all")
