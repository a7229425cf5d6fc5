"""DeBERTa as transformers names and describes it: version 1 as deberta, versions 2 and 3 as deberta-v2.

Query, key and value are one matrix here, and in version 1 also there. Both conversions are exact. Released files of V3
name no class and store the head under transformers' names for legacy=false; it is written under the other names, which
every release of transformers reads. transformers lacks a class for a discriminator's head, so it keeps the names of the
released files. The absolute positions of the published training are not read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from modernbert_train.config.deberta import DebertaConfig
from modernbert_train.config.objective import Order
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats import bert
from modernbert_train.weights.formats.config_json import SIZES, Content
from modernbert_train.weights.formats.electra import TOKEN_HEAD
from modernbert_train.weights.formats.shape import Shape
from modernbert_train.weights.formats.table_format import SPECIAL

POSITIONS = ("c2p", "p2c")  # values of pos_att_type, in any order, also joined by |
_LAYER = bert.LAYER | {
    "attn.Wqkv": ("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj")
}
_LAYER_V1 = _LAYER | {
    "attn.Wqkv": ("attention.self.in_proj",),
    "attn.Wkey": ("attention.self.pos_proj",),
    "attn.Wquery": ("attention.self.pos_q_proj",),
    "attn.query.bias": ("attention.self.q_bias",),
    "attn.value.bias": ("attention.self.v_bias",),
}


def _shapes(name: str, config: DebertaConfig) -> Shape | None:
    """See `HubFormat.shape`: a convolution's matrix has a dimension for the tokens that it spans."""
    if name != "model.convolution.dense.weight":
        return None
    return Shape((config.hidden_size, config.hidden_size, config.convolution))


def _more(config: DebertaConfig, order: Order, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return further keys. Distances beyond `max_relative_positions` are clipped, so it may read longer texts."""
    activation = "gelu" if config.activation == "gelu" else "gelu_new"
    return {
        "pos_att_type": list(POSITIONS),
        "position_buckets": -1 if config.version == "v1" else config.buckets,
        "max_relative_positions": config.max_distance,
        "embedding_size": config.embedding_width,
        **({"conv_kernel_size": config.convolution, "conv_act": activation} if config.convolution else {}),
        "legacy": True,
    }


def _build(
    raw: Content, fields: dict[str, Any], order: Order, longest: int, version: str = "v2"
) -> tuple[DebertaConfig, Order]:
    """Return the architecture; a number of distances below 1 means all positions."""
    kinds = raw.get("pos_att_type")
    kinds = [each.strip() for each in kinds.lower().split("|")] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or sorted(map(str, kinds)) != [*POSITIONS]:
        raise raw.unknown(f"both of {', '.join(POSITIONS)}", "pos_att_type")
    distance = int(raw.number("max_relative_positions", -1, minimum=-1))
    distance = fields["max_positions"] if distance < 1 else distance
    buckets = distance if version == "v1" else int(raw.number("position_buckets", -1, minimum=2))
    width = int(raw.number("embedding_size", fields["hidden_size"]))
    config = DebertaConfig(
        **fields,
        version=version,  # type: ignore[arg-type]
        convolution=int(raw.number("conv_kernel_size", 0, minimum=0, maximum=99)),
        max_distance=distance,
        buckets=buckets,
        embedding_size=None if width == fields["hidden_size"] else width,
    )
    activation = raw.get("hidden_act") or "gelu"
    if config.convolution and (raw.get("conv_act") or "tanh", raw.get("conv_groups") or 1) != (activation, 1):
        raise raw.unknown(f"hidden_act, {activation}, and 1", "conv_act", "conv_groups")
    if raw.get("attention_head_size") not in (None, config.head_size):
        raise raw.unknown(config.head_size, "attention_head_size", given="with these heads ")
    return config, order


def _build_v1(raw: Content, fields: dict[str, Any], order: Order, longest: int) -> tuple[DebertaConfig, Order]:
    return _build(raw, fields, order, longest, "v1")


V1 = replace(
    bert.FORMAT,
    config=DebertaConfig,
    model_type="deberta",
    classes={"all": "DebertaForMaskedLM"},
    for_heads={TOKEN_HEAD: "DebertaModel"},
    keys=SIZES
    | {"max_positions": "max_position_embeddings", "norm_eps": "layer_norm_eps", "init_std": "initializer_range"},
    special=SPECIAL,
    fixed={
        "relative_attention": True,
        "position_biased_input": False,
        "type_vocab_size": 0,
        "tie_word_embeddings": True,
        "talking_head": False,
    },
    defaults={"vocab_size": 50265, "relative_attention": False, "position_biased_input": True},  # base's
    prefix="deberta.",
    layer="encoder.layer.",
    parts=_LAYER_V1,
    outside={
        "model.embeddings.tok_embeddings": "embeddings.word_embeddings",
        "model.projection": "embeddings.embed_proj",
        "model.norm": "embeddings.LayerNorm",
        "model.distances": "encoder.rel_embeddings",
        "model.distance_norm": "encoder.LayerNorm",
        "model.convolution.dense": "encoder.conv.conv",
        "model.convolution.norm": "encoder.conv.LayerNorm",
        **bert.CLS_HEAD,
        f"{TOKEN_HEAD}.transform.norm": "mask_predictions.LayerNorm",
        f"{TOKEN_HEAD}.transform.dense": "mask_predictions.dense",
        f"{TOKEN_HEAD}.classifier": "mask_predictions.classifier",
    },
    renamed={
        "mask_predictions.classifer.": "mask_predictions.classifier.",  # a typo of the published code
        "lm_predictions.lm_head.": "cls.predictions.transform.",
    },
    copies={
        "lm_predictions.lm_head.weight": "cls.predictions.decoder.weight",
        "lm_predictions.lm_head.bias": "cls.predictions.bias",
    },
    unread=("deberta.embeddings.position_embeddings.", "deberta.embeddings.position_ids"),
    shapes=_shapes,
    more=_more,
    build=_build_v1,
)
FORMAT = replace(
    V1,
    model_type="deberta-v2",
    classes={"all": "DebertaV2ForMaskedLM"},
    for_heads={TOKEN_HEAD: "DebertaV2Model"},
    fixed=V1.fixed | {"share_att_key": True, "norm_rel_ebd": "layer_norm"},
    # v2-xlarge's
    defaults=V1.defaults
    | {"vocab_size": 128_100, "share_att_key": False, "norm_rel_ebd": "none"}
    | {"hidden_size": 1536, "num_hidden_layers": 24, "num_attention_heads": 24, "intermediate_size": 6144},
    parts=_LAYER,
    build=_build,
)
