"""Llama, Qwen2, Qwen3 and EuroBERT as transformers names and describes them; all four have the same names.

A bidirectional model is a EuroBERT. With a norm of heads or biases transformers lacks such a class, so it is a Qwen
with `is_causal: false` in config.json, which transformers 5 obeys and version 4 ignores.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from modernbert_train.config.llama import LlamaConfig
from modernbert_train.config.objective import Order
from modernbert_train.config.read import shown
from modernbert_train.errors import DataError
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats import rope
from modernbert_train.weights.formats.config_json import (
    SIZES,
    Described,
    head_of,
    number_under,
    numbers_under,
    places,
    require_fixed,
)

# model_type -> its class, and the fields of LlamaConfig that it switches on
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "eurobert": ("EuroBertForMaskedLM", {}),
    "llama": ("LlamaForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {"qkv_bias": True}),
    "qwen3": ("Qwen3ForCausalLM", {"qk_norm": True}),
}

# model_type -> transformers' defaults where they differ from this program's
_LLAMA = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-6}
_QWEN = _LLAMA | {"vocab_size": 151_936, "intermediate_size": 22_016, "max_position_embeddings": 32_768}
_QWEN |= {"num_key_value_heads": 32}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "eurobert": {},
    "llama": _LLAMA | {"vocab_size": 32_000, "intermediate_size": 11_008, "max_position_embeddings": 2048},
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
}

# Options of transformers' configurations, with the only value that this encoder implements.
FIXED: dict[str, Any] = {"hidden_act": "silu", "mlp_bias": False, "attention_bias": False, "use_sliding_window": False}

# LlamaConfig -> config.json, for keys with one number.
KEYS = SIZES | {"norm_eps": "rms_norm_eps", "init_std": "initializer_range"}

# module of a layer here -> in transformers
_LAYER = {
    "attn.Wq": ("self_attn.q_proj",),
    "attn.Wkv": ("self_attn.k_proj", "self_attn.v_proj"),
    "attn.Wo": ("self_attn.o_proj",),
    "attn.q_norm": ("self_attn.q_norm",),
    "attn.k_norm": ("self_attn.k_norm",),
    "attn_norm": ("input_layernorm",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.Wi": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.Wo": ("mlp.down_proj",),
}
_OUTSIDE = {
    "model.embeddings.tok_embeddings.weight": "model.embed_tokens.weight",
    "model.final_norm.weight": "model.norm.weight",
    "decoder.weight": "lm_head.weight",
}
TIED = {"lm_head.weight": "model.embed_tokens.weight"}  # some files store both: Qwen3-0.6B
_BODY = ("embed_tokens.", "layers.", "norm.")  # a file without the head lacks the prefix


def theirs(name: str, config: LlamaConfig) -> tuple[str, ...]:
    """See `HubFormat`."""
    return places(name, "model.layers.", _LAYER, _OUTSIDE)


def today(name: str) -> str | None:
    """See `HubFormat`; old files store RoPE frequencies, which follow from the configuration."""
    if name.endswith("rotary_emb.inv_freq"):
        return None
    return f"model.{name}" if name.startswith(_BODY) else name


def _kind_of(config: LlamaConfig, order: Order) -> str:
    if config.qk_norm:
        return "qwen3"
    if config.qkv_bias:
        return "qwen2"
    return "llama" if order == "causal" else "eurobert"


def describe(
    config: LlamaConfig, order: Order, modules: Collection[str], max_tokens: int, vocabulary: Vocabulary
) -> dict[str, Any]:
    """See `HubFormat`."""
    kind = _kind_of(config, order)
    positions = rope.describe(config)
    return {
        **head_of(KINDS[kind][0], kind, config, KEYS, FIXED),
        **({} if kind == "eurobert" else {"is_causal": order == "causal"}),
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "tie_word_embeddings": config.tied,
        "attention_dropout": 0.0,
        "max_position_embeddings": max_tokens,
        "rope_parameters": positions,
        "rope_theta": config.rope_theta,  # transformers 4 reads this and the next
        "rope_scaling": positions if config.rope_scaling != "none" else None,
        "bos_token_id": vocabulary.cls_id,
        "eos_token_id": vocabulary.sep_id,
        "pad_token_id": vocabulary.pad_id,
        **({"mask_token_id": vocabulary.mask_id, "classifier_pooling": "mean"} if kind == "eurobert" else {}),
    }


def read(raw: dict[str, Any], where: str) -> Described:
    """See `HubFormat`. Dropout of attention probabilities is ignored."""
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in KINDS:
        raise DataError(
            f"{where}: model_type={shown(kind)}; only model_type={', '.join(KINDS)} can be read. Name such a model."
        )
    require_fixed(raw, FIXED, where)
    types = raw.get("layer_types")
    if types is not None and types != ["full_attention"] * len(types if isinstance(types, list) else ""):
        raise DataError(
            f"{where}: layer_types={shown(types)}; every layer of this encoder sees the whole sequence. Name a model "
            "without windows."
        )
    for key in ("tie_word_embeddings", "is_causal"):
        if not isinstance(raw.get(key, False), bool):
            raise DataError(f"{where}: {key}={shown(raw[key])}, not true or false. Restore the file from a copy.")
    raw = {**_DEFAULTS[kind], **{key: value for key, value in raw.items() if value is not None}}
    numbers = numbers_under(raw, KEYS, LlamaConfig, where)
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise DataError(f"{where}: rope_parameters={shown(given)}, not an object. Restore the file from a copy.")
    max_tokens = int(number_under(raw, "max_position_embeddings", 8192, where))
    outside = {key: raw[key] for key in ("original_max_position_embeddings", "partial_rotary_factor") if key in raw}
    theta = rope.theta_under(raw, "rope_theta", 10_000.0, where)
    theta, scaling = rope.read({**given, **outside}, theta, max_tokens, where)
    config = LlamaConfig(
        **numbers,
        **KINDS[kind][1],
        rope_theta=theta,
        **scaling,
        key_value_heads=_heads(raw, "num_key_value_heads", int(numbers["num_heads"]), where),
        head_width=_heads(raw, "head_dim", int(numbers["hidden_size"]) // int(numbers["num_heads"]), where),
        tied=raw.get("tie_word_embeddings", False),
    )
    if problem := next(config.mistakes(), None) or uneven(config):
        raise DataError(f"{where}: {problem} Restore the file from a copy, or name another model.")
    order: Order = "all" if kind == "eurobert" or raw.get("is_causal") is False else "causal"
    return Described(config, max_tokens, order)


def uneven(config: LlamaConfig) -> str | None:
    """Return a message if the heads do not divide the width, else None."""
    if config.hidden_size % config.num_heads == 0:
        return None
    return f"hidden_size={config.hidden_size} is not a multiple of num_attention_heads={config.num_heads}."


def _heads(raw: dict[str, Any], key: str, usual: int, where: str) -> int | None:
    """Return a number of heads, or None for the usual one, so that equal configurations compare equal."""
    found = int(number_under(raw, key, max(1, usual), where))
    return None if found == usual else found
