"""ModernBERT as transformers names and describes it; parameters have the same names in both.

config.json states the architecture twice: in the keys of transformers 5 (layer_types, rope_parameters) and of 4.48 to
4.57 (global_attn_every_n_layers and the two *_rope_theta), so one folder loads in both without remote code.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from modernbert_train.config.objective import Order
from modernbert_train.config.read import shown
from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats import rope
from modernbert_train.weights.formats.config_json import (
    SIZES,
    Described,
    head_of,
    numbers_under,
    require_class,
    require_fixed,
    require_whole_heads,
    share_under,
)

MODEL_TYPE, ARCHITECTURE = "modernbert", "ModernBertForMaskedLM"

EMBEDDING, DECODER = "model.embeddings.tok_embeddings.weight", "decoder.weight"


# Options of transformers' configuration, with the only value that this encoder implements.
FIXED = {
    "hidden_activation": "gelu",
    "classifier_activation": "gelu",
    "attention_bias": False,
    "mlp_bias": False,
    "norm_bias": False,
    "classifier_bias": False,
    "decoder_bias": True,
    "tie_word_embeddings": True,
}

# ModernBertConfig -> config.json, for keys with one number.
KEYS = SIZES | {
    "local_attention": "local_attention",
    "norm_eps": "norm_eps",
    "init_std": "initializer_range",
    "init_cutoff": "initializer_cutoff_factor",
}


OUT_DROPOUT = "attention_out_dropout"  # this program's key
# Names in checkpoints of Composer -> transformers' names; the longer prefix first. `bert` is AnswerDotAI's FlexBERT; a
# leading `model.` is added by Composer's HuggingFaceModel around it, or around transformers' own ModernBERT.
PREFIXES = {
    "model.bert.encoder.layers.": "model.layers.",
    "model.bert.": "model.",
    "model.model.": "model.",
    "model.head.": "head.",
    "model.decoder.": "decoder.",
    "bert.encoder.layers.": "model.layers.",
    "bert.": "model.",
}


def theirs(name: str, config: ModernBertConfig) -> tuple[str, ...]:
    """See `HubFormat`; only the masked-LM model's head can be stored."""
    return (name,) if name.startswith(("model.", "head.", "decoder.")) else ()


def today(name: str) -> str | None:
    """See `HubFormat`."""
    for old, new in PREFIXES.items():
        if name.startswith(old):
            name = new + name.removeprefix(old)
            break
    return EMBEDDING if name == DECODER else name


def describe(
    config: ModernBertConfig, order: Order, modules: Collection[str], max_tokens: int, vocabulary: Vocabulary
) -> dict[str, Any]:
    """See `HubFormat`."""
    for key in ("global_rope_theta", "local_rope_theta"):
        theta = getattr(config, key)
        if not (math.isfinite(theta) and theta > 0):
            raise ConfigError(f"model.{key}={theta}: not exported, the model would give NaN. Set a positive RoPE base.")
    return {
        **head_of(ARCHITECTURE, MODEL_TYPE, config, KEYS, FIXED),
        "layer_norm_eps": config.norm_eps,  # name in candle and servers built on it; the release has both
        "max_position_embeddings": max_tokens,
        "layer_types": layer_types(config.global_attn_every_n_layers, config.num_layers),
        "global_attn_every_n_layers": config.global_attn_every_n_layers,
        "rope_parameters": rope.describe_layers(config),
        "global_rope_theta": float(config.global_rope_theta),
        "local_rope_theta": float(config.local_rope_theta),
        "attention_dropout": 0.0,  # would include attention probabilities, which are never dropped here
        OUT_DROPOUT: config.attention_out_dropout,
        "embedding_dropout": 0.0,
        "mlp_dropout": 0.0,
        "classifier_dropout": 0.0,
        "classifier_pooling": "mean",
        "bos_token_id": vocabulary.cls_id,
        "cls_token_id": vocabulary.cls_id,
        "eos_token_id": vocabulary.sep_id,
        "sep_token_id": vocabulary.sep_id,
        "pad_token_id": vocabulary.pad_id,
    }


def read(raw: dict[str, Any], where: str) -> Described:
    """See `HubFormat`."""
    return Described(architecture(raw, where), max_tokens_of(raw), "all")


def architecture(
    raw: dict[str, Any], where: str, model_type: str = MODEL_TYPE, named: str = ARCHITECTURE
) -> ModernBertConfig:
    """Read a config.json, RoPE bases included. Dropout after attention is this program's key or attention_dropout.

    Args:
        raw: its content.
        where: its name in messages.
        model_type, named: its required model_type, and one of its architectures.

    Raises:
        DataError: it describes another architecture or none; names the difference.
    """
    require_class(raw, where, model_type, named)
    require_fixed(raw, FIXED, where)
    given = numbers_under(raw, KEYS, ModernBertConfig, where)
    theta = rope.theta_under(raw, "global_rope_theta", 160_000.0, where)  # transformers' defaults for ModernBERT
    local = theta if raw.get("local_rope_theta", 0) is None else 10_000.0
    local = rope.theta_under(raw, "local_rope_theta", local, where)
    thetas, scaling = rope.read_layers(raw, {True: theta, False: local}, [True, False], max_tokens_of(raw), where)
    dropout = share_under(raw, OUT_DROPOUT, share_under(raw, "attention_dropout", 0.0, where), where)
    config = ModernBertConfig(
        **given, **scaling, global_rope_theta=thetas[0], local_rope_theta=thetas[1], attention_out_dropout=dropout
    )
    require_whole_heads(config, where)
    every_n = _global_attn_every_n_layers(raw, config.num_layers, where)
    return replace(config, global_attn_every_n_layers=every_n)


def max_tokens_of(raw: dict[str, Any]) -> int:
    """Return the longest sequence in a config.json; transformers' default for ModernBERT if it is missing."""
    stated = raw.get("max_position_embeddings")
    return stated if isinstance(stated, int) and stated > 0 else 8192


def layer_types(every_n: int, num_layers: int) -> list[str]:
    """Return the kind of each layer, in transformers' terms."""
    return ["sliding_attention" if layer % every_n else "full_attention" for layer in range(num_layers)]


def _global_attn_every_n_layers(raw: dict[str, Any], num_layers: int, where: str) -> int:
    stated = raw.get("global_attn_every_n_layers")
    if stated is not None and (isinstance(stated, bool) or not isinstance(stated, int) or stated < 1):
        raise DataError(
            f"{where}: global_attn_every_n_layers={shown(stated)}, not a whole number above 0. Name another."
        )
    types = raw.get("layer_types")
    if types is None:
        return stated or ModernBertConfig.global_attn_every_n_layers
    if not isinstance(types, list):
        raise DataError(f"{where}: layer_types={shown(types)}, not a list. Restore the file from a copy.")
    for every_n in [stated] if stated else range(1, num_layers + 1):
        if types == layer_types(every_n, num_layers):
            return every_n
    found = [layer for layer, kind in enumerate(types) if kind == "full_attention"]
    raise DataError(
        f"{where}: layer_types makes layers {found} of {len(types)} global, with num_hidden_layers={num_layers} and "
        f"global_attn_every_n_layers={stated}. This encoder knows one in every n, from layer 0. Name another model."
    )
