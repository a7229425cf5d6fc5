"""BERT and RoBERTa as transformers names and describes them.

One encoder here is two model types in transformers: with positions that start after the padding's id it is a RoBERTa.
Query, key and value are one matrix here and three there. Both conversions are exact. Of the
tied decoder only the embedding is stored. BERT can store the head for pairs; RoBERTa cannot.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from modernbert_train.config.bert import BertConfig
from modernbert_train.config.objective import Order
from modernbert_train.errors import ConfigError
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats.config_json import PAIR_HEAD, SIZES, Content
from modernbert_train.weights.formats.table_format import SPECIAL, Format

KEYS = SIZES | {"segments": "type_vocab_size", "norm_eps": "layer_norm_eps", "init_std": "initializer_range"}
LAYER = {
    "attn.Wqkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attn.Wo": ("attention.output.dense",),
    "attn_norm": ("attention.output.LayerNorm",),
    "mlp.Wi": ("intermediate.dense",),
    "mlp.Wo": ("output.dense",),
    "mlp_norm": ("output.LayerNorm",),
}
# names of norms in TensorFlow, and in transformers 5
OLD_NORMS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
CLS_HEAD = {
    "head.dense": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
    "decoder": "cls.predictions",
}
LM_HEAD = {"head.dense": "lm_head.dense", "head.norm": "lm_head.layer_norm", "decoder": "lm_head"}
EMBEDDINGS = {
    "model.embeddings.tok_embeddings": "embeddings.word_embeddings",
    "model.embeddings.segment_embeddings": "embeddings.token_type_embeddings",
    "model.embeddings.position_embeddings": "embeddings.position_embeddings",
    "model.embeddings.norm": "embeddings.LayerNorm",
}


def _more(config: BertConfig, order: Order, vocabulary: Vocabulary) -> dict[str, Any]:
    return {"is_decoder": order == "causal", "max_position_embeddings": config.max_positions + config.position_offset}


def _more_roberta(config: BertConfig, order: Order, vocabulary: Vocabulary) -> dict[str, Any]:
    if config.position_offset != vocabulary.pad_id + 1:
        raise ConfigError(
            f"model.position_offset={config.position_offset}, but transformers' RoBERTa counts positions from the "
            f"id of [PAD] + 1, which is {vocabulary.pad_id + 1} in this tokenizer. Set that before training, or 0 "
            "for a BERT."
        )
    if config.activation != "gelu":
        raise ConfigError(
            f"model.activation={config.activation}: transformers' RoBERTa always has the exact GELU in its head, "
            "so it would compute something different. Train with model.activation=gelu, or a BERT with "
            "model.position_offset=0."
        )
    return _more(config, order, vocabulary)


def build(
    raw: Content, fields: dict[str, Any], order: Order, longest: int, offset: int = 0
) -> tuple[BertConfig, Order]:
    """Return the encoder; `offset` is the number of the first position."""
    if bool(raw.get("is_decoder", False)) != (order == "causal"):
        raise raw.unknown(order == "causal", "is_decoder", "architectures", given="with this class ")
    rows = raw.number("max_position_embeddings", BertConfig.max_positions, minimum=offset + 1)
    return BertConfig(**fields, max_positions=int(rows) - offset, position_offset=offset), order


def _build_roberta(raw: Content, fields: dict[str, Any], order: Order, longest: int) -> tuple[BertConfig, Order]:
    offset = int(raw.number("pad_token_id", 1, minimum=0)) + 1
    return build(raw, fields, order, longest, offset)


FORMAT = Format(
    config=BertConfig,
    model_type="bert",
    classes={"all": "BertForMaskedLM", "causal": "BertLMHeadModel"},
    for_heads={PAIR_HEAD: "BertForPreTraining"},
    keys=KEYS,
    activation="hidden_act",
    dropout="hidden_dropout_prob",
    without_dropout=("attention_probs_dropout_prob",),
    special=("pad_token_id",),
    fixed={"add_cross_attention": False, "tie_word_embeddings": True, "position_embedding_type": "absolute"},
    prefix="bert.",
    layer="encoder.layer.",
    parts=LAYER,
    outside=EMBEDDINGS
    | CLS_HEAD
    | {f"{PAIR_HEAD}.dense": "bert.pooler.dense", f"{PAIR_HEAD}.classifier": "cls.seq_relationship"},
    body=("pooler.",),
    renamed=OLD_NORMS,
    unread=("embeddings.position_ids", "embeddings.token_type_ids"),
    more=_more,
    build=build,
)
ROBERTA = replace(
    FORMAT,
    model_type="roberta",
    classes={"all": "RobertaForMaskedLM", "causal": "RobertaForCausalLM"},
    for_heads={},
    activations=("gelu",),  # a RoBERTa's head has gelu regardless of hidden_act
    special=SPECIAL,
    defaults={"vocab_size": 50_265, "pad_token_id": 1},
    prefix="roberta.",
    outside=EMBEDDINGS | LM_HEAD,
    more=_more_roberta,
    build=_build_roberta,
)
# a roberta with another tokenizer: model_type -> beginning of its classes
OTHERS = [
    replace(
        ROBERTA,
        model_type=kind,
        classes={order: name.replace("Roberta", begin) for order, name in ROBERTA.classes.items()},
        defaults=ROBERTA.defaults | {"vocab_size": 30_522},
    )
    for kind, begin in {"xlm-roberta": "XLMRoberta", "camembert": "Camembert"}.items()
]
