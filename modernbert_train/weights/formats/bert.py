"""BERT and RoBERTa as transformers names and describes them.

One encoder here is two model types in transformers: with positions that start after the padding's id it is a RoBERTa.
Query, key and value are one matrix here and three there. Both conversions are exact. Of the
tied decoder only the embedding is stored. BERT can store the head for pairs; RoBERTa cannot.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from modernbert_train.config.bert import BertConfig
from modernbert_train.config.objective import Order
from modernbert_train.config.read import shown
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats.config_json import (
    ACTIVATIONS,
    PAIR_HEAD,
    SIZES,
    Described,
    activation_name,
    head_of,
    number_under,
    numbers_under,
    places,
    require_fixed,
    require_whole_heads,
    share_under,
)

# model_type -> its bidirectional classes; the second is written if there is a head for pairs
ARCHITECTURES = {"bert": ("BertForMaskedLM", "BertForPreTraining"), "roberta": ("RobertaForMaskedLM",)}
# class for causal order, with is_decoder=True
DECODERS = {"bert": "BertLMHeadModel", "roberta": "RobertaForCausalLM"}

# model_type -> prefix of its classes: a roberta with another tokenizer
ROBERTAS = {"xlm-roberta": "XLMRoberta", "camembert": "Camembert"}

# Options of transformers' configuration, with the only value that this encoder implements.
FIXED = {
    "add_cross_attention": False,
    "tie_word_embeddings": True,
    "position_embedding_type": "absolute",
}

# BertConfig -> config.json, for keys with one number.
KEYS = SIZES | {"segments": "type_vocab_size", "norm_eps": "layer_norm_eps", "init_std": "initializer_range"}


# module of a layer here -> in transformers
LAYER = {
    "attn.Wqkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attn.Wo": ("attention.output.dense",),
    "attn_norm": ("attention.output.LayerNorm",),
    "mlp.Wi": ("intermediate.dense",),
    "mlp.Wo": ("output.dense",),
    "mlp_norm": ("output.LayerNorm",),
}
_EMBEDDINGS = {
    "tok_embeddings": "word_embeddings",
    "segment_embeddings": "token_type_embeddings",
    "position_embeddings": "position_embeddings",
    "norm": "LayerNorm",
}
# heads; the decoder's bias is stored in its own module, its matrix is tied
_HEADS = {
    "bert": {
        "head.dense": "cls.predictions.transform.dense",
        "head.norm": "cls.predictions.transform.LayerNorm",
        "decoder": "cls.predictions",
        f"{PAIR_HEAD}.dense": "bert.pooler.dense",
        f"{PAIR_HEAD}.classifier": "cls.seq_relationship",
    },
    "roberta": {"head.dense": "lm_head.dense", "head.norm": "lm_head.layer_norm", "decoder": "lm_head"},
}
_COPIES = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
    "lm_head.decoder.bias": "lm_head.bias",
}
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")  # in files of older versions; not weights


def theirs(name: str, config: BertConfig) -> tuple[str, ...]:
    """See `HubFormat`."""
    return encoder_name(name, config.model_type) or places(name, "", {}, _HEADS[config.model_type])


def encoder_name(name: str, kind: str) -> tuple[str, ...]:
    """Return the name of an encoder's parameter in a model of this type; empty if it is not in the encoder."""
    outside = {f"model.embeddings.{ours}": f"{kind}.embeddings.{named}" for ours, named in _EMBEDDINGS.items()}
    return places(name, f"{kind}.encoder.layer.", LAYER, outside)


def today(name: str) -> str | None:
    """See `HubFormat`; released files have TensorFlow's names of norms."""
    if name.endswith(_BUFFERS):
        return None
    return _COPIES.get(with_todays_norm(name), with_todays_norm(name))


def with_todays_norm(name: str) -> str:
    """Return a name with the present names of a norm's tensors."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def describe(
    config: BertConfig, order: Order, modules: Collection[str], max_tokens: int, vocabulary: Vocabulary
) -> dict[str, Any]:
    """See `HubFormat`. The longest sequence is the number of position vectors.

    Raises:
        ConfigError: a RoBERTa whose positions are not counted from the tokenizer's [PAD], or whose activation is not
            gelu.
    """
    kind = config.model_type
    special: dict[str, int] = {"pad_token_id": vocabulary.pad_id}
    if kind == "roberta":
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
        special |= {"bos_token_id": vocabulary.cls_id, "eos_token_id": vocabulary.sep_id}
    named = DECODERS[kind] if order == "causal" else ARCHITECTURES[kind][PAIR_HEAD in modules]
    return {
        **head_of(named, kind, config, KEYS, FIXED),
        "is_decoder": order == "causal",
        "hidden_act": activation_name(config.activation),
        "max_position_embeddings": config.max_positions + config.position_offset,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": 0.0,
        **special,
    }


def read(raw: dict[str, Any], where: str) -> Described:
    """See `HubFormat`. Dropout of attention probabilities is ignored: it only concerns training, and this encoder lacks
    it.
    """
    kind, named = raw.get("model_type"), raw.get("architectures")
    if isinstance(kind, str) and kind in ROBERTAS and isinstance(named, list):
        named = [str(each).replace(ROBERTAS[kind], "Roberta") for each in named]
        return read({"vocab_size": 30_522, **raw, "model_type": "roberta", "architectures": named}, where)
    known = ARCHITECTURES.get(kind, ()) if isinstance(kind, str) else ()
    found = named if isinstance(named, list) else []
    causal = bool(known) and DECODERS[str(kind)] in found
    if not causal and not any(name in found for name in known):
        choices = " or ".join(
            f"model_type={kind}, architectures=['{n}']"
            for kind, a in ARCHITECTURES.items()
            for n in (*a, DECODERS[kind])
        )
        raise DataError(
            f"{where}: model_type={shown(kind)}, architectures={shown(named)}; only {choices} can be read. Name such a "
            "model."
        )
    if bool(raw.get("is_decoder", False)) != causal:
        raise DataError(
            f"{where}: is_decoder={shown(raw.get('is_decoder'))} with architectures={shown(named)}; of these only "
            f"{causal} can be read. Name another model."
        )
    config = architecture(raw, where, str(kind))
    return Described(config, config.max_positions, "causal" if causal else "all")


def architecture(raw: dict[str, Any], where: str, kind: str) -> BertConfig:
    """Return the encoder of a config.json, for a bert or a roberta; see `read`.

    Raises:
        DataError: it describes another architecture or none; names the difference.
    """
    require_fixed(raw, FIXED, where)
    activation = raw.get("hidden_act", "gelu")
    usable = list(ACTIVATIONS) if kind == "bert" else ["gelu"]  # a RoBERTa's head has gelu regardless of hidden_act
    if activation not in usable:
        raise DataError(
            f"{where}: hidden_act={shown(activation)}; of a {kind} this encoder only knows {', '.join(usable)}. Name "
            "another model."
        )
    offset = 0
    if kind == "roberta":
        raw = {"vocab_size": 50265, "pad_token_id": 1, **raw}  # transformers' defaults, where they are not BERT's
        offset = int(number_under(raw, "pad_token_id", 1, where, least=0)) + 1
    defaults = BertConfig()
    rows = int(number_under(raw, "max_position_embeddings", defaults.max_positions, where, least=offset + 1))
    config = BertConfig(
        **numbers_under(raw, KEYS, defaults, where),
        max_positions=rows - offset,
        position_offset=offset,
        activation=ACTIVATIONS[activation],
        dropout=share_under(raw, "hidden_dropout_prob", defaults.dropout, where),
    )
    require_whole_heads(config, where)
    return config
