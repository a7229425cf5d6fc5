"""Llama, Qwen2, Qwen3 and EuroBERT as transformers names and describes them; all four have the same names.

A bidirectional model is a EuroBERT. With a norm of heads or biases transformers lacks such a class, so it is a Qwen
with `is_causal: false` in config.json, which transformers 5 obeys and version 4 ignores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from modernbert_train.config.llama import LlamaConfig
from modernbert_train.config.objective import Order
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats import rope
from modernbert_train.weights.formats.config_json import SIZES, Content
from modernbert_train.weights.formats.table_format import SPECIAL, Format

KEYS = SIZES | {"norm_eps": "rms_norm_eps", "init_std": "initializer_range"}


def _more(config: LlamaConfig, order: Order, vocabulary: Vocabulary) -> dict[str, Any]:
    positions = rope.describe(config)
    return {
        "is_causal": order == "causal",
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "tie_word_embeddings": config.tied,
        "rope_parameters": positions,
        "rope_theta": config.rope_theta,  # transformers 4 reads this and the next
        "rope_scaling": positions if config.rope_scaling != "none" else None,
    }


def _more_eurobert(config: LlamaConfig, order: Order, vocabulary: Vocabulary) -> dict[str, Any]:
    more = {key: value for key, value in _more(config, order, vocabulary).items() if key != "is_causal"}
    return more | {"classifier_pooling": "mean"}


def _build(
    raw: Content,
    fields: dict[str, Any],
    order: Order,
    longest: int,
    own: Mapping[str, Any] | None = None,
    is_encoder: bool = False,
) -> tuple[LlamaConfig, Order]:
    """Return the architecture; `own` are fields that the model_type sets, an encoder sees both sides in any case."""
    types, positions = raw.get("layer_types"), raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if types is not None and types != ["full_attention"] * len(types if isinstance(types, list) else ""):
        raise raw.unknown("full_attention: every layer of this encoder sees the whole sequence", "layer_types")
    for key in ("tie_word_embeddings", "is_causal"):
        if raw.get(key) is not None and not isinstance(raw[key], bool):
            raise raw.damaged(key, "not true or false")
    if not isinstance(positions, dict):
        raise raw.damaged("rope_scaling" if raw.get("rope_scaling") else "rope_parameters", "not an object")
    outside = ("original_max_position_embeddings", "partial_rotary_factor")
    positions = Content(positions | {key: raw[key] for key in outside if raw.get(key) is not None}, raw.where)
    theta, scaling = rope.read(positions, rope.theta_under(raw, "rope_theta", 10_000.0), longest)
    heads = fields["num_heads"]
    config = LlamaConfig(
        **fields,
        **(own or {}),
        rope_theta=theta,
        **scaling,
        key_value_heads=_heads(raw, "num_key_value_heads", heads),
        head_width=_heads(raw, "head_dim", fields["hidden_size"] // heads),
        tied=raw.get("tie_word_embeddings") or False,
    )
    return config, "all" if is_encoder or raw.get("is_causal") is False else "causal"


def _heads(raw: Content, key: str, usual: int) -> int | None:
    """Return a number of heads, or None for the usual one, so that equal configurations compare equal."""
    num_heads = raw.number(key, max(1, usual))
    return None if num_heads == usual else num_heads


LLAMA = Format(
    config=LlamaConfig,
    model_type="llama",
    classes={"causal": "LlamaForCausalLM"},
    any_class=True,
    keys=KEYS,
    longest="max_position_embeddings",
    without_dropout=("attention_dropout",),
    fixed={"hidden_act": "silu", "mlp_bias": False, "attention_bias": False, "use_sliding_window": False},
    defaults={
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-6,
        "vocab_size": 32_000, "intermediate_size": 11_008, "max_position_embeddings": 2048,
    },
    prefix="model.",
    layer="layers.",
    parts={
        "attn.Wq": ("self_attn.q_proj",),
        "attn.Wkv": ("self_attn.k_proj", "self_attn.v_proj"),
        "attn.Wo": ("self_attn.o_proj",),
        "attn.q_norm": ("self_attn.q_norm",),
        "attn.k_norm": ("self_attn.k_norm",),
        "attn_norm": ("input_layernorm",),
        "mlp_norm": ("post_attention_layernorm",),
        "mlp.Wi": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.Wo": ("mlp.down_proj",),
    },
    outside={
        "model.embeddings.tok_embeddings.weight": "embed_tokens.weight",
        "model.final_norm.weight": "norm.weight",
        "decoder.weight": "lm_head.weight",
    },
    tied={"lm_head.weight": "model.embed_tokens.weight"},  # some files store both: Qwen3-0.6B
    unread=("rotary_emb.inv_freq",),  # in old files; it follows from the configuration
    more=_more,
    build=_build,
)  # fmt: skip
EUROBERT = replace(
    LLAMA,
    model_type="eurobert",
    classes={"all": "EuroBertForMaskedLM"},
    decoder=LLAMA,
    special=(*SPECIAL, "mask_token_id"),
    defaults={"max_position_embeddings": 8192},
    more=_more_eurobert,
    build=partial(_build, is_encoder=True),
)
QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    classes=dict.fromkeys(("all", "causal"), "Qwen2ForCausalLM"),
    defaults=LLAMA.defaults
    | {"vocab_size": 151_936, "intermediate_size": 22_016, "max_position_embeddings": 32_768}
    | {"num_key_value_heads": 32},
    build=partial(_build, own={"qkv_bias": True}),
)
QWEN3 = replace(
    QWEN2,
    model_type="qwen3",
    classes=dict.fromkeys(("all", "causal"), "Qwen3ForCausalLM"),
    defaults=QWEN2.defaults | {"head_dim": 128},
    build=partial(_build, own={"qk_norm": True}),
)
