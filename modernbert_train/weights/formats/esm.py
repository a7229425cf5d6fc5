"""ESM-2 as transformers names and describes it: EsmForMaskedLM with rotary positions.

Query, key and value are one matrix here and three there. The head that predicts contacts of proteins is dropped when a
model is read; transformers draws a new one for an exported model.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from modernbert_train.config.bert import EsmConfig
from modernbert_train.config.objective import Order
from modernbert_train.errors import ConfigError
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats import bert
from modernbert_train.weights.formats.config_json import (
    Described,
    head_of,
    number_under,
    numbers_under,
    places,
    require_class,
    require_fixed,
    require_possible,
    require_whole_heads,
)

MODEL_TYPE, ARCHITECTURE = "esm", "EsmForMaskedLM"

FIXED = {
    "position_embedding_type": "rotary",
    "emb_layer_norm_before": False,
    "is_folding_model": False,
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
# EsmConfig -> config.json, where one number is one key
KEYS = {"rope_theta": "rope_theta"} | {ours: named for ours, named in bert.KEYS.items() if ours != "segments"}
# transformers' defaults, where they are not ours
_DEFAULTS = {
    "position_embedding_type": "absolute",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "token_dropout": False,
}
_LAYER = bert.LAYER | {"attn_norm": ("attention.LayerNorm",), "mlp_norm": ("LayerNorm",)}
_OUTSIDE = {
    "model.embeddings.tok_embeddings": "esm.embeddings.word_embeddings",
    "model.final_norm": "esm.encoder.emb_layer_norm_after",
    "head.dense": "lm_head.dense",
    "head.norm": "lm_head.layer_norm",
    "decoder": "lm_head",
}
_COPIES = {"lm_head.decoder.weight": "esm.embeddings.word_embeddings.weight", "lm_head.decoder.bias": "lm_head.bias"}
# in the released files; not read with rotary positions
_UNREAD = ("esm.contact_head.", "esm.embeddings.position_")


def theirs(name: str, config: EsmConfig) -> tuple[str, ...]:
    """See `HubFormat`."""
    return places(name, "esm.encoder.layer.", _LAYER, _OUTSIDE)


def today(name: str) -> str | None:
    """See `HubFormat`; transformers 5 saves norms under TensorFlow's names."""
    name = bert.with_todays_norm(name)
    return None if name.startswith(_UNREAD) or name.endswith("inv_freq") else _COPIES.get(name, name)


def describe(
    config: EsmConfig, order: Order, modules: Collection[str], max_tokens: int, vocabulary: Vocabulary
) -> dict[str, Any]:
    """See `HubFormat`.

    Raises:
        ConfigError: token dropout was trained with another [MASK].
    """
    if config.token_dropout and config.mask_id != vocabulary.mask_id:
        raise ConfigError(f"model.mask_id={config.mask_id}: the tokenizer's [MASK] is {vocabulary.mask_id}. Set that.")
    return {
        **head_of(ARCHITECTURE, MODEL_TYPE, config, KEYS, FIXED),
        "token_dropout": config.token_dropout,
        "mask_token_id": vocabulary.mask_id,
        "pad_token_id": vocabulary.pad_id,
        "bos_token_id": vocabulary.cls_id,
        "eos_token_id": vocabulary.sep_id,
        "max_position_embeddings": max_tokens,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


def read(raw: dict[str, Any], where: str) -> Described:
    """See `HubFormat`. Dropout is not taken over: it only concerns training, and this encoder has none."""
    require_class(raw, where, MODEL_TYPE, ARCHITECTURE)
    raw = _DEFAULTS | {key: value for key, value in raw.items() if value is not None}
    require_fixed(raw, FIXED, where)
    config = EsmConfig(
        **numbers_under(raw, KEYS, EsmConfig, where),
        token_dropout=raw["token_dropout"] is True,
        mask_id=int(number_under(raw, "mask_token_id", 32, where, least=0)),
    )
    require_whole_heads(config, where)
    require_possible(config, where)
    return Described(config, int(number_under(raw, "max_position_embeddings", 1026, where)), "all")
