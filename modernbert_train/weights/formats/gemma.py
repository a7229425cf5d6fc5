"""Gemma 3's text models as transformers names and describes them; use_bidirectional_attention marks an encoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from modernbert_train.config.gemma import GemmaConfig
from modernbert_train.config.objective import Order
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats import llama, rope
from modernbert_train.weights.formats.config_json import Content

_PATTERN = "sliding_window_pattern"
# norm of a layer here -> in transformers
_NORMS = {
    "attn_norm": "input_layernorm",
    "attn_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
}


def _layer_types(config: GemmaConfig) -> list[str]:
    return [rope.LAYERS[config.is_global(index)] for index in range(config.num_layers)]


def _more(config: GemmaConfig, order: Order, vocabulary: Vocabulary) -> dict[str, Any]:
    positions = rope.describe_layers(config)
    return {
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "query_pre_attn_scalar": config.head_size,
        "use_bidirectional_attention": order != "causal",
        "layer_types": _layer_types(config),
        "rope_parameters": positions,
        "rope_theta": config.rope_theta,  # transformers 4 reads these three
        "rope_local_base_freq": config.local_rope_theta,
        "rope_scaling": positions["full_attention"] if config.rope_scaling != "none" else None,
        _PATTERN: config.global_every,
    }


def _build(raw: Content, fields: dict[str, Any], order: Order, longest: int) -> tuple[GemmaConfig, Order]:
    theta = rope.theta_under(raw, "rope_theta", GemmaConfig.rope_theta)
    local_theta = rope.theta_under(raw, "rope_local_base_freq", GemmaConfig.local_rope_theta)
    thetas, scaling = rope.read_layers(raw, {True: theta, False: local_theta}, [True], longest)
    every, types = raw.get(_PATTERN, raw.get(f"_{_PATTERN}")), raw.get("layer_types")
    if isinstance(types, list) and "full_attention" in types:  # transformers prefers these to a pattern
        every = types.index("full_attention") + 1
    every = Content({_PATTERN: every}, raw.where).number(_PATTERN, 6)
    own = {"rope_theta": thetas[0], "local_rope_theta": thetas[1], "global_every": every}
    config = GemmaConfig(**fields, **own, **scaling)
    if types is not None and types != _layer_types(config):
        raise raw.unknown("one full_attention in every n", "layer_types")
    scale = raw.number("query_pre_attn_scalar", 256)
    if scale != config.head_size:
        raise raw.unknown(f"head_dim, {config.head_size}", "query_pre_attn_scalar")
    return config, "all" if raw.get("use_bidirectional_attention") is True else "causal"


FORMAT = replace(
    llama.LLAMA,
    config=GemmaConfig,
    model_type="gemma3_text",
    classes=dict.fromkeys(("all", "causal"), "Gemma3ForCausalLM"),
    keys=llama.KEYS
    | {"local_attention": "sliding_window", "key_value_heads": "num_key_value_heads", "head_width": "head_dim"},
    fixed={
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "tie_word_embeddings": True,
    },
    defaults={
        "vocab_size": 262_208, "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 9216, "sliding_window": 4096,
        "max_position_embeddings": 131_072, "query_pre_attn_scalar": 256,
    },
    # a norm has a scale of 1 plus its weight
    parts={**llama.LLAMA.parts, **{f"{ours}.scale_bias": (f"{theirs}.weight",) for ours, theirs in _NORMS.items()}},
    outside=llama.LLAMA.outside | {"model.final_norm.scale_bias": "norm.weight"},
    more=_more,
    build=_build,
)  # fmt: skip
