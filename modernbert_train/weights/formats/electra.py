"""A BERT trained to detect replaced tokens, and its generator, as transformers' ELECTRA.

The encoder is BERT's under another prefix. A discriminator is an ElectraForPreTraining, a generator an
ElectraForMaskedLM, whose embeddings may be wider than its layers. ELECTRA counts positions from 0, so a RoBERTa's rows
before the first token's, which are never read, are left out (`positions_from_zero` in tensors.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from modernbert_train.config.bert import BertConfig
from modernbert_train.config.objective import Order
from modernbert_train.errors import ConfigError
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats import bert
from modernbert_train.weights.formats.config_json import Content
from modernbert_train.weights.formats.table_format import Format

TOKEN_HEAD = "token_head"  # name of the module `TokenClass`


def _more(config: BertConfig, order: Order, vocabulary: Vocabulary) -> dict[str, Any]:
    return {"max_position_embeddings": config.max_positions, "embedding_size": config.hidden_size}


def _build(raw: Content, fields: dict[str, Any], order: Order, longest: int) -> tuple[BertConfig, Order]:
    if raw["embedding_size"] != raw["hidden_size"]:
        raise raw.unknown("embeddings of its hidden width", "embedding_size", "hidden_size")
    return bert.build(raw, fields, order, longest)


FORMAT = replace(
    bert.FORMAT,
    model_type="electra",
    classes={"all": "ElectraForMaskedLM"},
    for_heads={TOKEN_HEAD: "ElectraForPreTraining"},
    defaults={"embedding_size": 128, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024},
    fixed=bert.FORMAT.fixed | {"is_decoder": False},
    prefix="electra.",
    outside=bert.EMBEDDINGS
    | {
        f"{TOKEN_HEAD}.transform.dense": "discriminator_predictions.dense",
        f"{TOKEN_HEAD}.classifier": "discriminator_predictions.dense_prediction",
        "head.dense": "generator_predictions.dense",
        "head.norm": "generator_predictions.LayerNorm",
        "decoder": "generator_lm_head",
        "model.embeddings.projection": "embeddings_project",
    },
    copies={"generator_predictions.bias": "generator_lm_head.bias"},
    more=_more,
    build=_build,
)


def generator_format(config: BertConfig, embedding_size: int | None) -> Format:
    """Return the format of a generator; `embedding_size` if its embeddings are wider than its layers.

    Raises:
        ConfigError: its activation is not gelu.
    """
    if config.activation != "gelu":
        raise ConfigError(
            f"model.activation={config.activation}: transformers' ELECTRA always has the exact GELU in a "
            "generator's head, so it would compute something different. Export only the discriminator."
        )

    def more(config: BertConfig, order: Order, vocabulary: Vocabulary) -> dict[str, Any]:
        return _more(config, order, vocabulary) | {"embedding_size": embedding_size or config.hidden_size}

    return replace(FORMAT, more=more)
