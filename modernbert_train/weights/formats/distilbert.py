"""DistilBERT as transformers names and describes it: BERT's parts without token types, under names of its own."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from modernbert_train.config.bert import DistilBertConfig
from modernbert_train.config.objective import Order
from modernbert_train.config.read import shown
from modernbert_train.core.version import __version__
from modernbert_train.errors import DataError
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats.bert import ACTIVATIONS
from modernbert_train.weights.formats.config_json import Described, number_under

ARCHITECTURE = "DistilBertForMaskedLM"

# What the configuration can say and this encoder does not do otherwise.
FIXED = {"tie_word_embeddings": True, "sinusoidal_pos_embds": False}

# DistilBertConfig -> config.json, where one number is one key.
KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_layers": "n_layers",
    "num_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "max_positions": "max_position_embeddings",
    "init_std": "initializer_range",
}

# of a layer here -> there
_LAYER = {
    "attn.Wqkv": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    "attn.Wo": ("attention.out_lin",),
    "attn_norm": ("sa_layer_norm",),
    "mlp.Wi": ("ffn.lin1",),
    "mlp.Wo": ("ffn.lin2",),
    "mlp_norm": ("output_layer_norm",),
}
_OUTSIDE = {
    "model.embeddings.tok_embeddings": "distilbert.embeddings.word_embeddings",
    "model.embeddings.position_embeddings": "distilbert.embeddings.position_embeddings",
    "model.embeddings.norm": "distilbert.embeddings.LayerNorm",
    "head.dense": "vocab_transform",
    "head.norm": "vocab_layer_norm",
    "decoder": "vocab_projector",
}
_BODY = ("embeddings.", "transformer.")  # of a file without the head, which lacks the prefix


def theirs(name: str, config: DistilBertConfig) -> tuple[str, ...]:
    """See `HubFormat`."""
    module, _, last = name.rpartition(".")
    if name.startswith("model.layers."):
        number, _, part = module.removeprefix("model.layers.").partition(".")
        return tuple(f"distilbert.transformer.layer.{number}.{each}.{last}" for each in _LAYER[part])
    return (f"{_OUTSIDE[module]}.{last}",) if module in _OUTSIDE else ()


def today(name: str) -> str | None:
    """See `HubFormat`."""
    if name.endswith("embeddings.position_ids"):
        return None
    if name == "vocab_projector.weight":
        return "distilbert.embeddings.word_embeddings.weight"
    return f"distilbert.{name}" if name.startswith(_BODY) else name


def describe(
    config: DistilBertConfig, order: Order, modules: Collection[str], max_tokens: int, vocabulary: Vocabulary
) -> dict[str, Any]:
    """See `HubFormat`. The longest sequence is as many as there are position vectors."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "distilbert",
        "exported_by": f"modernbert_train {__version__}",
        "dtype": "float32",
        **{theirs: getattr(config, ours) for ours, theirs in KEYS.items()},
        **FIXED,
        "activation": next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.activation),
        "dropout": config.dropout,
        "attention_dropout": 0.0,
        "pad_token_id": vocabulary.pad_id,
    }


def read(raw: dict[str, Any], where: str) -> Described:
    """See `HubFormat`. Dropout of attention probabilities is not taken over: it concerns training alone, and there is
    none here.
    """
    named = raw.get("architectures")
    if raw.get("model_type") != "distilbert" or not isinstance(named, list) or ARCHITECTURE not in named:
        raise DataError(
            f"{where}: model_type={shown(raw.get('model_type'))}, architectures={shown(named)}; only "
            f"model_type=distilbert, architectures=['{ARCHITECTURE}'] can be read. Name such a model."
        )
    for key, value in FIXED.items():
        if raw.get(key) not in (None, value):
            raise DataError(f"{where}: {key}={shown(raw[key])}; this encoder only knows {value}. Name another model.")
    if raw.get("pruned_heads"):
        raise DataError(
            f"{where}: pruned_heads={shown(raw['pruned_heads'])}; this encoder has all. Name another model."
        )
    activation = raw.get("activation", "gelu")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise DataError(
            f"{where}: activation={shown(activation)}; this encoder only knows {', '.join(ACTIVATIONS)}. Name another "
            "model."
        )
    defaults = DistilBertConfig()
    numbers = {ours: number_under(raw, theirs, getattr(defaults, ours), where) for ours, theirs in KEYS.items()}
    config = DistilBertConfig(
        **numbers,  # type: ignore[arg-type]  # whole where the default is
        activation=ACTIVATIONS[activation],
        dropout=float(number_under(raw, "dropout", defaults.dropout, where, least=0.0, most=0.999)),
    )
    if config.hidden_size % config.num_heads:
        raise DataError(
            f"{where}: dim={config.hidden_size} is not a multiple of n_heads={config.num_heads}. Restore the file from "
            "a copy."
        )
    return Described(config, config.max_positions, "all")
