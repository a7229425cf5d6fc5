"""ModernBERT as transformers names and describes it; parameters have the same names in both.

config.json states the architecture twice: in the keys of transformers 5 (layer_types, rope_parameters) and of 4.48 to
4.57 (global_attn_every_n_layers and the two *_rope_theta), so one folder loads in both without remote code.
"""

from __future__ import annotations

import math
from typing import Any

from modernbert_train.config.objective import Order
from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats import rope
from modernbert_train.weights.formats.config_json import SIZES, Content
from modernbert_train.weights.formats.table_format import SPECIAL, Format

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


def names(name: str, config: ModernBertConfig) -> tuple[str, ...]:
    """See `HubFormat.theirs`; only the masked-LM model's head can be stored."""
    return (name,) if name.startswith(("model.", "head.", "decoder.")) else ()


def more(config: ModernBertConfig, order: Order, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the keys of config.json that no table covers.

    Raises:
        ConfigError: a RoPE base is not positive and finite.
    """
    for key in ("global_rope_theta", "local_rope_theta"):
        theta = getattr(config, key)
        if not (math.isfinite(theta) and theta > 0):
            raise ConfigError(f"model.{key}={theta}: not exported, the model would give NaN. Set a positive RoPE base.")
    return {
        "layer_norm_eps": config.norm_eps,  # name in candle and servers built on it; the release has both
        "layer_types": _layer_types(config.global_attn_every_n_layers, config.num_layers),
        "global_attn_every_n_layers": config.global_attn_every_n_layers,
        "rope_parameters": rope.describe_layers(config),
        "global_rope_theta": float(config.global_rope_theta),
        "local_rope_theta": float(config.local_rope_theta),
        OUT_DROPOUT: config.attention_out_dropout,
        "classifier_pooling": "mean",
    }


def build(raw: Content, fields: dict[str, Any], order: Order, longest: int) -> tuple[ModernBertConfig, Order]:
    """Return the architecture. Dropout after attention is this program's key or attention_dropout.

    Raises:
        DataError: it describes another architecture; names the difference.
    """
    theta = rope.theta_under(raw, "global_rope_theta", 160_000.0)  # transformers' defaults for ModernBERT
    local = theta if raw.get("local_rope_theta", 0) is None else 10_000.0
    local = rope.theta_under(raw, "local_rope_theta", local)
    thetas, scaling = rope.read_layers(raw, {True: theta, False: local}, [True, False], longest)
    own: dict[str, Any] = {"global_rope_theta": thetas[0], "local_rope_theta": thetas[1], **scaling}
    own[OUT_DROPOUT] = raw.share(OUT_DROPOUT, raw.share("attention_dropout", 0.0))
    every_n = _global_attn_every_n_layers(raw, fields["num_layers"])
    return ModernBertConfig(**fields, **own, global_attn_every_n_layers=every_n), order


def _layer_types(every_n: int, num_layers: int) -> list[str]:
    return [rope.LAYERS[layer % every_n == 0] for layer in range(num_layers)]


def _global_attn_every_n_layers(raw: Content, num_layers: int) -> int:
    stated = raw.get("global_attn_every_n_layers")
    usual = raw.number("global_attn_every_n_layers", ModernBertConfig.global_attn_every_n_layers)
    types = raw.get("layer_types")
    if types is None:
        return usual
    if not isinstance(types, list):
        raise raw.damaged("layer_types", "not a list")
    for every_n in [stated] if stated else range(1, num_layers + 1):
        if types == _layer_types(every_n, num_layers):
            return every_n
    global_layers = [layer for layer, kind in enumerate(types) if kind == "full_attention"]
    raise DataError(
        f"{raw.where}: layer_types makes layers {global_layers} of {len(types)} global, with "
        f"num_hidden_layers={num_layers} and global_attn_every_n_layers={stated}. This encoder knows one in "
        "every n, from layer 0. Name another model."
    )


FORMAT = Format(
    config=ModernBertConfig,
    model_type="modernbert",
    classes={"all": "ModernBertForMaskedLM"},
    keys=SIZES
    | {
        "local_attention": "local_attention",
        "norm_eps": "norm_eps",
        "init_std": "initializer_range",
        "init_cutoff": "initializer_cutoff_factor",
    },
    longest="max_position_embeddings",
    # attention_dropout would include attention probabilities, which are never dropped here
    without_dropout=("attention_dropout", "embedding_dropout", "mlp_dropout", "classifier_dropout"),
    special=(*SPECIAL, "cls_token_id", "sep_token_id"),
    fixed={
        "hidden_activation": "gelu",
        "classifier_activation": "gelu",
        "attention_bias": False,
        "mlp_bias": False,
        "norm_bias": False,
        "classifier_bias": False,
        "decoder_bias": True,
        "tie_word_embeddings": True,
    },
    defaults={"max_position_embeddings": 8192},
    prefix="model.",
    body=("embeddings.", "layers.", "final_norm."),
    renamed=PREFIXES,
    copies={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
    names=names,
    more=more,
    build=build,
)
