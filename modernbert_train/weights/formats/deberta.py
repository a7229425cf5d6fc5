"""DeBERTa as transformers names and describes it: version 1 as deberta, versions 2 and 3 as deberta-v2.

Query, key and value are one matrix here, and in version 1 also there. Both conversions are exact. Released files of V3
name no class and store the head under transformers' names for legacy=false; it is written under the other names, which
every release of transformers reads. transformers lacks a class for a discriminator's head, so it keeps the names of the
released files. The absolute positions of the published training are not read.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

from modernbert_train.config.deberta import DebertaConfig
from modernbert_train.config.objective import Order
from modernbert_train.config.read import shown
from modernbert_train.errors import DataError
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats.config_json import (
    ACTIVATIONS,
    SIZES,
    Described,
    activation_name,
    head_of,
    number_under,
    numbers_under,
    one_of,
    places,
    require_fixed,
    require_whole_heads,
    share_under,
)
from modernbert_train.weights.formats.electra import TOKEN_HEAD
from modernbert_train.weights.formats.shape import Shape

# model_type -> version, and the masked-LM class
VERSIONS: dict[str, tuple[Literal["v1", "v2"], str]] = {
    "deberta": ("v1", "DebertaForMaskedLM"),
    "deberta-v2": ("v2", "DebertaV2ForMaskedLM"),
}
DISCRIMINATORS = {"v1": "DebertaModel", "v2": "DebertaV2Model"}

# Options of transformers' configuration, with the only value that this encoder implements.
FIXED: dict[str, Any] = {
    "relative_attention": True,
    "position_biased_input": False,
    "type_vocab_size": 0,
    "tie_word_embeddings": True,
    "talking_head": False,
}
# The same, for version 2 only.
FIXED_V2: dict[str, Any] = {"share_att_key": True, "norm_rel_ebd": "layer_norm"}
POSITIONS = ("c2p", "p2c")  # values of pos_att_type, in any order, also joined by |

# DebertaConfig -> config.json, for keys with one number.
KEYS = SIZES | {
    "max_positions": "max_position_embeddings",
    "norm_eps": "layer_norm_eps",
    "init_std": "initializer_range",
}
# transformers' defaults where they differ from this program's: base of version 1, and v2-xlarge
_V1: dict[str, Any] = {"vocab_size": 50265, "relative_attention": False, "position_biased_input": True}
_DEFAULTS = {
    "v1": _V1,
    "v2": _V1
    | {"vocab_size": 128_100, "share_att_key": False, "norm_rel_ebd": "none"}
    | {"hidden_size": 1536, "num_hidden_layers": 24, "num_attention_heads": 24, "intermediate_size": 6144},
}

# module of a layer here -> in transformers
_LAYER = {
    "attn.Wqkv": ("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj"),
    "attn.Wo": ("attention.output.dense",),
    "attn_norm": ("attention.output.LayerNorm",),
    "mlp.Wi": ("intermediate.dense",),
    "mlp.Wo": ("output.dense",),
    "mlp_norm": ("output.LayerNorm",),
}
_LAYER_V1 = _LAYER | {
    "attn.Wqkv": ("attention.self.in_proj",),
    "attn.Wkey": ("attention.self.pos_proj",),
    "attn.Wquery": ("attention.self.pos_q_proj",),
    "attn.query.bias": ("attention.self.q_bias",),
    "attn.value.bias": ("attention.self.v_bias",),
}
_OUTSIDE = {
    "model.embeddings.tok_embeddings": "deberta.embeddings.word_embeddings",
    "model.projection": "deberta.embeddings.embed_proj",
    "model.norm": "deberta.embeddings.LayerNorm",
    "model.distances": "deberta.encoder.rel_embeddings",
    "model.distance_norm": "deberta.encoder.LayerNorm",
    "model.convolution.dense": "deberta.encoder.conv.conv",
    "model.convolution.norm": "deberta.encoder.conv.LayerNorm",
    "head.dense": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
    "decoder": "cls.predictions",
    f"{TOKEN_HEAD}.transform.norm": "mask_predictions.LayerNorm",
    f"{TOKEN_HEAD}.transform.dense": "mask_predictions.dense",
    f"{TOKEN_HEAD}.classifier": "mask_predictions.classifier",
}
_EMBEDDING = "deberta.embeddings.word_embeddings.weight"
_COPIES = {
    "cls.predictions.decoder.weight": _EMBEDDING,
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "lm_predictions.lm_head.weight": _EMBEDDING,
    "lm_predictions.lm_head.bias": "cls.predictions.bias",
}
_OTHER_HEAD = "lm_predictions.lm_head."
_MISSPELT = "mask_predictions.classifer."  # a typo of the published code
_UNREAD = ("deberta.embeddings.position_embeddings.", "deberta.embeddings.position_ids")


def theirs(name: str, config: DebertaConfig) -> tuple[str, ...]:
    """See `HubFormat`."""
    return places(name, "deberta.encoder.layer.", _LAYER_V1 if config.version == "v1" else _LAYER, _OUTSIDE)


def shape(name: str, config: DebertaConfig) -> Shape | None:
    """See `HubFormat`: a convolution's matrix has a dimension for the tokens that it spans."""
    if name != "model.convolution.dense.weight":
        return None
    return Shape((config.hidden_size, config.hidden_size, config.convolution))


def today(name: str) -> str | None:
    """See `HubFormat`."""
    if name.startswith(_UNREAD):
        return None
    if name in _COPIES:
        return _COPIES[name]
    if name.startswith(_MISSPELT):
        return name.replace(_MISSPELT, "mask_predictions.classifier.", 1)
    if name.startswith(_OTHER_HEAD):
        return name.replace(_OTHER_HEAD, "cls.predictions.transform.", 1)
    return name


def describe(
    config: DebertaConfig, order: Order, modules: Collection[str], max_tokens: int, vocabulary: Vocabulary
) -> dict[str, Any]:
    """See `HubFormat`. Distances beyond `max_relative_positions` are clipped, so the model may read longer texts."""
    named = DISCRIMINATORS[config.version] if TOKEN_HEAD in modules else VERSIONS[config.model_type][1]
    activation = activation_name(config.activation)
    convolution = {"conv_kernel_size": config.convolution, "conv_act": activation} if config.convolution else {}
    return {
        **head_of(named, config.model_type, config, KEYS, FIXED if config.version == "v1" else FIXED | FIXED_V2),
        "pos_att_type": list(POSITIONS),
        "position_buckets": -1 if config.version == "v1" else config.buckets,
        "max_relative_positions": config.max_distance,
        "embedding_size": config.embedding_width,
        "hidden_act": activation,
        **convolution,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": 0.0,
        "legacy": True,
        "pad_token_id": vocabulary.pad_id,
        "bos_token_id": vocabulary.cls_id,
        "eos_token_id": vocabulary.sep_id,
    }


def read(raw: dict[str, Any], where: str) -> Described:
    """See `HubFormat`. Dropout of attention probabilities is ignored: it only concerns training, and this encoder lacks
    it."""
    kind, named = raw.get("model_type"), raw.get("architectures")
    version, predicts = VERSIONS.get(kind, (None, "")) if isinstance(kind, str) else (None, "")
    if version is None or named not in (None, [], [predicts], [DISCRIMINATORS[version]]):
        choices = " or ".join(f"model_type={k} with {n} or {DISCRIMINATORS[v]}" for k, (v, n) in VERSIONS.items())
        raise DataError(
            f"{where}: model_type={shown(kind)}, architectures={shown(named)}; only {choices}, or no architectures, "
            "can be read. Name such a model."
        )
    raw = {**_DEFAULTS[version], **{key: value for key, value in raw.items() if value is not None}}
    require_fixed(raw, FIXED if version == "v1" else FIXED | FIXED_V2, where)
    kinds = raw.get("pos_att_type")
    kinds = [each.strip() for each in kinds.lower().split("|")] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or sorted(map(str, kinds)) != [*POSITIONS]:
        raise DataError(
            f"{where}: pos_att_type={shown(raw.get('pos_att_type'))}; this encoder only knows both of "
            f"{', '.join(POSITIONS)}. Name another model."
        )
    activation = one_of(raw, "hidden_act", "gelu", ACTIVATIONS, where)
    config = _numbers(raw, version, ACTIVATIONS[activation], where)
    if config.convolution and (raw.get("conv_act", "tanh"), raw.get("conv_groups", 1)) != (activation, 1):
        raise DataError(
            f"{where}: conv_act={shown(raw.get('conv_act'))}, conv_groups={shown(raw.get('conv_groups'))}; this "
            f"encoder only knows hidden_act, {activation}, and 1. Name another model."
        )
    require_whole_heads(config, where)
    if raw.get("attention_head_size", config.head_size) != config.head_size:
        raise DataError(
            f"{where}: attention_head_size={shown(raw['attention_head_size'])}; with these heads this encoder only "
            f"knows {config.head_size}. Name another model."
        )
    if wrong := next(config.mistakes(), None):
        raise DataError(f"{where}: {wrong} Here it is max_relative_positions and position_buckets.")
    return Described(config, config.max_positions, "all", detects=named == [DISCRIMINATORS[version]])


def _numbers(
    raw: dict[str, Any], version: Literal["v1", "v2"], activation: Literal["gelu", "gelu_tanh"], where: str
) -> DebertaConfig:
    """Return the architecture from the numbers of a config.json; a number of distances below 1 means all positions."""
    numbers = numbers_under(raw, KEYS, DebertaConfig, where)
    distance = int(number_under(raw, "max_relative_positions", -1, where, least=-1))
    distance = numbers["max_positions"] if distance < 1 else distance
    buckets = distance if version == "v1" else int(number_under(raw, "position_buckets", -1, where, least=2))
    width = int(number_under(raw, "embedding_size", int(numbers["hidden_size"]), where))
    return DebertaConfig(
        version=version,
        convolution=int(number_under(raw, "conv_kernel_size", 0, where, least=0, most=99)),
        **numbers,
        max_distance=distance,
        buckets=buckets,
        embedding_size=None if width == numbers["hidden_size"] else width,
        activation=activation,
        dropout=share_under(raw, "hidden_dropout_prob", DebertaConfig.dropout, where),
    )
