"""XLNet as transformers names and describes it.

Its attention matrices have a dimension for the heads, after the model's width. The matrices into the heads are stored
transposed; the one out of the heads has the same numbers in the same order. Nothing is rounded, so every bit is kept
both ways. transformers has one class for bidirectional and causal models; `attn_type` distinguishes them. It reads
predictions of a permuted order from query tokens and others from the token itself; a key of this program distinguishes
these. It cannot store the head for pairs. Memory of earlier text is ignored.
"""

from __future__ import annotations

from typing import Any

from modernbert_train.config.objective import Order
from modernbert_train.config.xlnet import XLNetConfig
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats.config_json import PREDICTS_FROM, Content
from modernbert_train.weights.formats.shape import Shape
from modernbert_train.weights.formats.table_format import Format

QUERY_TOKENS, OWN_PLACE = "query_tokens", "own_place"  # values of PREDICTS_FROM; a missing key means query tokens
# Memory of earlier text, which does not change the weights: switched off in exports, and ignored in reading.
NO_MEMORY = {"mem_len": None, "reuse_len": None, "use_mems_eval": False, "use_mems_train": False}
ORDERS: dict[str, Order] = {"bi": "all", "uni": "causal"}  # attn_type -> which tokens each token sees


def _shapes(name: str, config: XLNetConfig) -> Shape | None:
    """See `HubFormat.shape`: attention matrices have a dimension for heads, single vectors two more."""
    heads = (config.num_heads, config.head_size)
    module = name.rpartition(".")[0]
    if module.endswith(("attn.Wqkv", "attn.Wr", "attn.Wo")):
        return Shape((config.hidden_size, *heads), transposed=not module.endswith("attn.Wo"))
    if module.endswith("attn.segments"):
        return Shape((2, *heads))
    return Shape((1, 1, config.hidden_size)) if module.endswith("embeddings.query") else None


def _more(config: XLNetConfig, order: Order, vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        PREDICTS_FROM: QUERY_TOKENS if order == "given" else OWN_PLACE,
        "d_head": config.head_size,
        "attn_type": "uni" if order == "causal" else "bi",
        **NO_MEMORY,
    }


def _build(raw: Content, fields: dict[str, Any], order: Order, longest: int) -> tuple[XLNetConfig, Order]:
    config = XLNetConfig(**fields)
    if raw.get("d_head") not in (None, config.head_size):
        heads = f"with d_model={config.hidden_size} and n_head={config.num_heads} "
        raise raw.unknown(config.head_size, "d_head", given=heads)
    attention = raw.word("attn_type", "bi", ORDERS)
    predicts = raw.word(PREDICTS_FROM, QUERY_TOKENS, (QUERY_TOKENS, OWN_PLACE))
    return config, "given" if (attention, predicts) == ("bi", QUERY_TOKENS) else ORDERS[attention]


FORMAT = Format(
    config=XLNetConfig,
    model_type="xlnet",
    classes={"all": "XLNetLMHeadModel", "causal": "XLNetLMHeadModel"},
    keys={
        "vocab_size": "vocab_size",
        "hidden_size": "d_model",
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "intermediate_size": "d_inner",
        "norm_eps": "layer_norm_eps",
        "init_std": "initializer_range",
    },
    longest="max_tokens",  # this program's key: an XLNet has no longest sequence
    activation="ff_activation",
    dropout="dropout",
    fixed={"untie_r": True, "bi_data": False, "clamp_len": -1, "same_length": False, "tie_word_embeddings": True},
    defaults={"d_model": 1024, "n_layer": 24, "n_head": 16, "d_inner": 4096, "max_tokens": 512},  # XLNet-large's
    prefix="transformer.",
    layer="layer.",
    parts={
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
    },
    outside={
        "model.embeddings.tok_embeddings.weight": "word_embedding.weight",
        "model.embeddings.query.weight": "mask_emb",
        "decoder": "lm_loss",
    },
    shapes=_shapes,
    more=_more,
    build=_build,
)
