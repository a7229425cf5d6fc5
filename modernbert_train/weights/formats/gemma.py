"""Gemma 3's text models as transformers names and describes them; use_bidirectional_attention marks an encoder."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from modernbert_train.config.gemma import GemmaConfig
from modernbert_train.config.objective import Order
from modernbert_train.config.read import shown
from modernbert_train.errors import DataError
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats import llama, rope
from modernbert_train.weights.formats.config_json import Described, head_of, number_under, numbers_under, require_fixed

MODEL_TYPE, ARCHITECTURE = "gemma3_text", "Gemma3ForCausalLM"

# Options of transformers' configuration, with the only value that this encoder implements.
FIXED: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "tie_word_embeddings": True,
}
KEYS = llama.KEYS | {"local_attention": "sliding_window", "key_value_heads": "num_key_value_heads"}
KEYS |= {"head_width": "head_dim"}
# transformers' defaults where they differ from this program's
_DEFAULTS = {
    "vocab_size": 262_208, "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 9216, "sliding_window": 4096,
}  # fmt: skip

# norm of a layer here -> in transformers
_NORMS = {
    "attn_norm": "input_layernorm",
    "attn_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
}

today, TIED = llama.today, llama.TIED


def theirs(name: str, config: GemmaConfig) -> tuple[str, ...]:
    """See `HubFormat`."""
    if not name.endswith("scale_bias"):
        return llama.theirs(name, config)
    if name.startswith("model.final_norm"):
        return ("model.norm.weight",)
    number, _, part = name.removeprefix("model.layers.").partition(".")
    return (f"model.layers.{number}.{_NORMS[part.removesuffix('.scale_bias')]}.weight",)


def layer_types(config: GemmaConfig) -> list[str]:
    """Return the kind of each layer, in transformers' terms."""
    return [f"{'full' if config.is_global(index) else 'sliding'}_attention" for index in range(config.num_layers)]


def describe(
    config: GemmaConfig, order: Order, modules: Collection[str], max_tokens: int, vocabulary: Vocabulary
) -> dict[str, Any]:
    """See `HubFormat`."""
    positions = rope.describe_layers(config)
    return {
        **head_of(ARCHITECTURE, MODEL_TYPE, config, KEYS, FIXED),
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "query_pre_attn_scalar": config.head_size,
        "use_bidirectional_attention": order != "causal",
        "layer_types": layer_types(config),
        "attention_dropout": 0.0,
        "max_position_embeddings": max_tokens,
        "rope_parameters": positions,
        "rope_theta": config.rope_theta,  # transformers 4 reads these three
        "rope_local_base_freq": config.local_rope_theta,
        "rope_scaling": positions["full_attention"] if config.rope_scaling != "none" else None,
        "sliding_window_pattern": config.global_every,
        "bos_token_id": vocabulary.cls_id,
        "eos_token_id": vocabulary.sep_id,
        "pad_token_id": vocabulary.pad_id,
    }


def read(raw: dict[str, Any], where: str) -> Described:
    """See `HubFormat`. Dropout of attention probabilities is ignored."""
    if raw.get("model_type") != MODEL_TYPE:
        raise DataError(
            f"{where}: model_type={shown(raw.get('model_type'))}; only model_type={MODEL_TYPE} can be read. Name such "
            "a model."
        )
    require_fixed(raw, FIXED, where)
    raw = {**_DEFAULTS, **{key: value for key, value in raw.items() if value is not None}}
    numbers = numbers_under(raw, KEYS, GemmaConfig, where)
    max_tokens = int(number_under(raw, "max_position_embeddings", 131_072, where))
    theta = rope.theta_under(raw, "rope_theta", GemmaConfig.rope_theta, where)
    local_theta = rope.theta_under(raw, "rope_local_base_freq", GemmaConfig.local_rope_theta, where)
    thetas, scaling = rope.read_layers(raw, {True: theta, False: local_theta}, [True], max_tokens, where)
    every = raw.get("sliding_window_pattern", raw.get("_sliding_window_pattern"))
    types = raw.get("layer_types")
    if isinstance(types, list) and "full_attention" in types:  # transformers prefers these to a pattern
        every = types.index("full_attention") + 1
    config = GemmaConfig(
        **numbers,
        rope_theta=thetas[0],
        local_rope_theta=thetas[1],
        **scaling,
        global_every=int(number_under({"sliding_window_pattern": every}, "sliding_window_pattern", 6, where)),
    )
    if problem := next(config.mistakes(), None) or llama.uneven(config):
        raise DataError(f"{where}: {problem} Restore the file from a copy, or name another model.")
    if types is not None and types != layer_types(config):
        raise DataError(f"{where}: layer_types={shown(types)}; this encoder knows one in every n. Name another model.")
    scale = number_under(raw, "query_pre_attn_scalar", 256, where)
    if scale != config.head_size:
        raise DataError(
            f"{where}: query_pre_attn_scalar={scale} with head_dim={config.head_size}; this encoder only knows them "
            "equal. Name another model."
        )
    order: Order = "all" if raw.get("use_bidirectional_attention") is True else "causal"
    return Described(config, max_tokens, order)
