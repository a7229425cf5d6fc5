"""DistilBERT as transformers names and describes it: BERT's modules without token types, under other names."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from modernbert_train.config.bert import DistilBertConfig
from modernbert_train.config.objective import Order
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats.config_json import (
    ACTIVATIONS,
    Described,
    activation_name,
    head_of,
    numbers_under,
    one_of,
    places,
    require_class,
    require_fixed,
    require_whole_heads,
    share_under,
)

ARCHITECTURE = "DistilBertForMaskedLM"

# Options of transformers' configuration, with the only value that this encoder implements.
FIXED = {"tie_word_embeddings": True, "sinusoidal_pos_embds": False}

# DistilBertConfig -> config.json, for keys with one number.
KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_layers": "n_layers",
    "num_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "max_positions": "max_position_embeddings",
    "init_std": "initializer_range",
}

# module of a layer here -> in transformers
_LAYER = {
    "attn.Wqkv": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    "attn.Wo": ("attention.out_lin",),
    "attn_norm": ("sa_layer_norm",),
    "mlp.Wi": ("ffn.lin1",),
    "mlp.Wo": ("ffn.lin2",),
    "mlp_norm": ("output_layer_norm",),
}
_OUTSIDE = {
    "model.embeddings.tok_embeddings": "distilbert.embeddings.word_embeddings",
    "model.embeddings.position_embeddings": "distilbert.embeddings.position_embeddings",
    "model.embeddings.norm": "distilbert.embeddings.LayerNorm",
    "head.dense": "vocab_transform",
    "head.norm": "vocab_layer_norm",
    "decoder": "vocab_projector",
}
_BODY = ("embeddings.", "transformer.")  # a file without the head lacks the prefix


def theirs(name: str, config: DistilBertConfig) -> tuple[str, ...]:
    """See `HubFormat`."""
    return places(name, "distilbert.transformer.layer.", _LAYER, _OUTSIDE)


def today(name: str) -> str | None:
    """See `HubFormat`."""
    if name.endswith("embeddings.position_ids"):
        return None
    if name == "vocab_projector.weight":
        return "distilbert.embeddings.word_embeddings.weight"
    return f"distilbert.{name}" if name.startswith(_BODY) else name


def describe(
    config: DistilBertConfig, order: Order, modules: Collection[str], max_tokens: int, vocabulary: Vocabulary
) -> dict[str, Any]:
    """See `HubFormat`. The longest sequence is the number of position vectors."""
    return {
        **head_of(ARCHITECTURE, "distilbert", config, KEYS, FIXED),
        "activation": activation_name(config.activation),
        "dropout": config.dropout,
        "attention_dropout": 0.0,
        "pad_token_id": vocabulary.pad_id,
    }


def read(raw: dict[str, Any], where: str) -> Described:
    """See `HubFormat`. Dropout of attention probabilities is ignored: it only concerns training, and this encoder lacks
    it.
    """
    require_class(raw, where, "distilbert", ARCHITECTURE)
    require_fixed(raw, FIXED, where)
    defaults = DistilBertConfig()
    config = DistilBertConfig(
        **numbers_under(raw, KEYS, defaults, where),
        activation=ACTIVATIONS[one_of(raw, "activation", "gelu", ACTIVATIONS, where)],
        dropout=share_under(raw, "dropout", defaults.dropout, where),
    )
    require_whole_heads(config, where, "dim", "n_heads")
    return Described(config, config.max_positions, "all")
