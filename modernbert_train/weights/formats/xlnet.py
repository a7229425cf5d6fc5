"""XLNet as transformers names and describes it.

Its attention matrices have a dimension for the heads, after the model's width. The matrices into the heads are stored
transposed; the one out of the heads has the same numbers in the same order. Nothing is rounded, so every bit is kept
both ways. transformers has one class for bidirectional and causal models; `attn_type` distinguishes them. It reads
predictions of a permuted order from query tokens and others from the token itself; a key of this program distinguishes
these. It cannot store the head for pairs.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from modernbert_train.config.objective import Order
from modernbert_train.config.read import shown
from modernbert_train.config.xlnet import XLNetConfig
from modernbert_train.errors import DataError
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats.config_json import (
    ACTIVATIONS,
    PREDICTS_FROM,
    Described,
    activation_name,
    head_of,
    number_under,
    numbers_under,
    one_of,
    places,
    require_class,
    require_fixed,
    require_whole_heads,
    share_under,
)
from modernbert_train.weights.formats.shape import Shape

MODEL_TYPE, ARCHITECTURE = "xlnet", "XLNetLMHeadModel"
QUERY_TOKENS, OWN_PLACE = "query_tokens", "own_place"  # values of PREDICTS_FROM; a missing key means query tokens

# Options of transformers' configuration, with the only value that this encoder implements.
FIXED: dict[str, Any] = {
    "untie_r": True,
    "bi_data": False,
    "clamp_len": -1,
    "same_length": False,
    "tie_word_embeddings": True,
}
# Memory of earlier text, which does not change the weights: switched off in exports, and ignored in reading.
NO_MEMORY = {"mem_len": None, "reuse_len": None, "use_mems_eval": False, "use_mems_train": False}

# XLNetConfig -> config.json, for keys with one number.
KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "intermediate_size": "d_inner",
    "norm_eps": "layer_norm_eps",
    "init_std": "initializer_range",
}
# transformers' defaults where they differ from this program's; XLNet-large's
_DEFAULTS = {"d_model": 1024, "n_layer": 24, "n_head": 16, "d_inner": 4096}

ORDERS: dict[str, Order] = {"bi": "all", "uni": "causal"}  # attn_type -> which tokens each token sees

_TRANSPOSED = ("attn.Wqkv", "attn.Wr")
# parameter or module of a layer here -> in transformers
_LAYER = {
    "attn.Wqkv.weight": ("rel_attn.q", "rel_attn.k", "rel_attn.v"),
    "attn.Wr.weight": ("rel_attn.r",),
    "attn.Wo.weight": ("rel_attn.o",),
    "attn.content.bias": ("rel_attn.r_w_bias",),
    "attn.position.bias": ("rel_attn.r_r_bias",),
    "attn.segment.bias": ("rel_attn.r_s_bias",),
    "attn.segments.weight": ("rel_attn.seg_embed",),
    "attn_norm": ("rel_attn.layer_norm",),
    "mlp.Wi": ("ff.layer_1",),
    "mlp.Wo": ("ff.layer_2",),
    "mlp_norm": ("ff.layer_norm",),
}
_OUTSIDE = {
    "model.embeddings.tok_embeddings.weight": "transformer.word_embedding.weight",
    "model.embeddings.query.weight": "transformer.mask_emb",
    "decoder.bias": "lm_loss.bias",
}
_COPIES = {"lm_loss.weight": "transformer.word_embedding.weight"}


def theirs(name: str, config: XLNetConfig) -> tuple[str, ...]:
    """See `HubFormat`."""
    return places(name, "transformer.layer.", _LAYER, _OUTSIDE)


def today(name: str) -> str | None:
    """See `HubFormat`."""
    return _COPIES.get(name, name)


def shape(name: str, config: XLNetConfig) -> Shape | None:
    """See `HubFormat`: attention matrices have a dimension for heads, single vectors two more."""
    heads = (config.num_heads, config.head_size)
    module = name.rpartition(".")[0]
    if module.endswith(("attn.Wqkv", "attn.Wr", "attn.Wo")):
        return Shape((config.hidden_size, *heads), transposed=module.endswith(_TRANSPOSED))
    if module.endswith("attn.segments"):
        return Shape((2, *heads))
    return Shape((1, 1, config.hidden_size)) if module.endswith("embeddings.query") else None


def describe(
    config: XLNetConfig, order: Order, modules: Collection[str], max_tokens: int, vocabulary: Vocabulary
) -> dict[str, Any]:
    """See `HubFormat`. XLNet has no longest sequence; `max_tokens` is a key of this program."""
    return {
        **head_of(ARCHITECTURE, MODEL_TYPE, config, {}, {}),
        PREDICTS_FROM: QUERY_TOKENS if order == "given" else OWN_PLACE,
        "max_tokens": max_tokens,
        **{theirs: getattr(config, ours) for ours, theirs in KEYS.items()},
        "d_head": config.head_size,
        "attn_type": "uni" if order == "causal" else "bi",
        "ff_activation": activation_name(config.activation),
        "dropout": config.dropout,
        **FIXED,
        **NO_MEMORY,
        "pad_token_id": vocabulary.pad_id,
        "bos_token_id": vocabulary.cls_id,
        "eos_token_id": vocabulary.sep_id,
    }


def read(raw: dict[str, Any], where: str) -> Described:
    """See `HubFormat`. Memory of earlier text and dropout of attention probabilities are ignored."""
    require_class(raw, where, MODEL_TYPE, ARCHITECTURE)
    require_fixed(raw, FIXED, where)
    attention = one_of(raw, "attn_type", "bi", ORDERS, where)
    activation = one_of(raw, "ff_activation", "gelu", ACTIVATIONS, where)
    predicts = one_of(raw, PREDICTS_FROM, QUERY_TOKENS, (QUERY_TOKENS, OWN_PLACE), where)
    raw = {**_DEFAULTS, **{key: value for key, value in raw.items() if value is not None}}
    numbers = numbers_under(raw, KEYS, XLNetConfig, where)
    config = XLNetConfig(
        **numbers,
        activation=ACTIVATIONS[activation],
        dropout=share_under(raw, "dropout", XLNetConfig.dropout, where),
    )
    require_whole_heads(config, where, "d_model", "n_head")
    if problem := next(config.mistakes(), None):
        raise DataError(f"{where}: {problem} Here it is d_model.")
    if raw.get("d_head", config.head_size) != config.head_size:
        raise DataError(
            f"{where}: d_head={shown(raw['d_head'])}; with d_model={config.hidden_size} and n_head={config.num_heads} "
            f"this encoder only knows {config.head_size}. Name another model."
        )
    order = "given" if (attention, predicts) == ("bi", QUERY_TOKENS) else ORDERS[attention]
    return Described(config, int(number_under(raw, "max_tokens", 512, where)), order)
