"""ESM-2 as transformers names and describes it: EsmForMaskedLM with rotary positions.

Query, key and value are one matrix here and three there. The head that predicts contacts of proteins is dropped when a
model is read; transformers draws a new one for an exported model.
"""

from __future__ import annotations

from typing import Any

from modernbert_train.config.bert import EsmConfig
from modernbert_train.config.objective import Order
from modernbert_train.errors import ConfigError
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats import bert
from modernbert_train.weights.formats.config_json import Content
from modernbert_train.weights.formats.table_format import SPECIAL, Format


def _more(config: EsmConfig, order: Order, vocabulary: Vocabulary) -> dict[str, Any]:
    if config.token_dropout and config.mask_id != vocabulary.mask_id:
        raise ConfigError(f"model.mask_id={config.mask_id}: the tokenizer's [MASK] is {vocabulary.mask_id}. Set that.")
    return {"token_dropout": config.token_dropout}


def _build(raw: Content, fields: dict[str, Any], order: Order, longest: int) -> tuple[EsmConfig, Order]:
    mask_id = int(raw.number("mask_token_id", 32, minimum=0))
    return EsmConfig(**fields, token_dropout=raw["token_dropout"] is True, mask_id=mask_id), order


FORMAT = Format(
    config=EsmConfig,
    model_type="esm",
    classes={"all": "EsmForMaskedLM"},
    keys={"rope_theta": "rope_theta"} | {ours: each for ours, each in bert.KEYS.items() if ours != "segments"},
    longest="max_position_embeddings",
    without_dropout=("hidden_dropout_prob", "attention_probs_dropout_prob"),
    special=(*SPECIAL, "mask_token_id"),
    fixed={
        "position_embedding_type": "rotary",
        "emb_layer_norm_before": False,
        "is_folding_model": False,
        "is_decoder": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    defaults={
        "position_embedding_type": "absolute", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072, "layer_norm_eps": 1e-12, "token_dropout": False, "max_position_embeddings": 1026,
    },
    prefix="esm.",
    layer="encoder.layer.",
    parts=bert.LAYER | {"attn_norm": ("attention.LayerNorm",), "mlp_norm": ("LayerNorm",)},
    outside={
        "model.embeddings.tok_embeddings": "embeddings.word_embeddings",
        "model.final_norm": "encoder.emb_layer_norm_after",
        **bert.LM_HEAD,
    },
    body=("pooler.",),
    renamed=bert.OLD_NORMS,
    unread=("contact_head.", "esm.embeddings.position_", "inv_freq"),  # in the released files
    more=_more,
    build=_build,
)  # fmt: skip
