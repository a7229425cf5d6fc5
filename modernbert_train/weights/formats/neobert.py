"""NeoBERT as its published code names and describes it; transformers lacks a class for it.

config.json names the code on the Hub (`auto_map`), which transformers fetches and runs where a user sets
`trust_remote_code=True`. This program never does.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from modernbert_train.config.neobert import NeoBertConfig
from modernbert_train.config.objective import Order
from modernbert_train.config.read import shown
from modernbert_train.core.version import __version__
from modernbert_train.errors import DataError
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats.config_json import (
    Described,
    number_under,
    numbers_under,
    places,
    require_possible,
    require_whole_heads,
)

MODEL_TYPE, ARCHITECTURE = "neobert", "NeoBERTLMHead"
_CODE = "chandar-lab/NeoBERT--model"
AUTO_MAP = {
    "AutoConfig": f"{_CODE}.NeoBERTConfig",
    "AutoModel": f"{_CODE}.NeoBERT",
    "AutoModelForMaskedLM": f"{_CODE}.{ARCHITECTURE}",
    "AutoModelForSequenceClassification": f"{_CODE}.NeoBERTForSequenceClassification",
}

# NeoBertConfig -> config.json, for keys with one number.
KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "norm_eps": "norm_eps",
}

# module of a layer here -> in the published code
_LAYER = {
    "attn.Wqkv": ("qkv",),
    "attn.Wo": ("wo",),
    "attn_norm": ("attention_norm",),
    "mlp_norm": ("ffn_norm",),
    "mlp.Wi": ("ffn.w12",),
    "mlp.Wo": ("ffn.w3",),
}
_OUTSIDE = {
    "model.embeddings.tok_embeddings.weight": "model.encoder.weight",
    "model.final_norm.weight": "model.layer_norm.weight",
    "decoder.weight": "decoder.weight",
    "decoder.bias": "decoder.bias",
}
_BODY = ("encoder.", "transformer_encoder.", "layer_norm.")  # a file without the decoder lacks the prefix


def theirs(name: str, config: NeoBertConfig) -> tuple[str, ...]:
    """See `HubFormat`."""
    return places(name, "model.transformer_encoder.", _LAYER, _OUTSIDE)


def today(name: str) -> str | None:
    """See `HubFormat`."""
    return f"model.{name}" if name.startswith(_BODY) else name


def describe(
    config: NeoBertConfig, order: Order, modules: Collection[str], max_tokens: int, vocabulary: Vocabulary
) -> dict[str, Any]:
    """See `HubFormat`."""
    spread = config.init_std * config.init_cutoff
    return {
        "architectures": [ARCHITECTURE],
        "auto_map": AUTO_MAP,
        "model_type": MODEL_TYPE,
        "exported_by": f"modernbert_train {__version__}",
        "dtype": "float32",
        **{theirs: getattr(config, ours) for ours, theirs in KEYS.items()},
        "intermediate_size": config.intermediate_size * 3 // 2,
        "max_length": max_tokens,
        "embedding_init_range": spread,
        "decoder_init_range": spread,
        "classifier_init_range": 0.02,
        "tie_word_embeddings": False,
        "pad_token_id": vocabulary.pad_id,
    }


def read(raw: dict[str, Any], where: str) -> Described:
    """See `HubFormat`."""
    kind, named = raw.get("model_type"), raw.get("architectures")
    if kind != MODEL_TYPE or named not in (None, [ARCHITECTURE], ["NeoBERT"]):
        raise DataError(
            f"{where}: model_type={shown(kind)}, architectures={shown(named)}; only model_type={MODEL_TYPE} with "
            f"{ARCHITECTURE} or NeoBERT can be read. Name such a model."
        )
    if raw.get("tie_word_embeddings") is True:
        raise DataError(f"{where}: tie_word_embeddings=True; this encoder only knows False. Name another model.")
    numbers = numbers_under(raw, KEYS, NeoBertConfig, where)
    wide = int(number_under(raw, "intermediate_size", 3072, where))
    config = NeoBertConfig(**numbers, intermediate_size=-(-(2 * wide // 3) // 8) * 8)
    require_whole_heads(config, where)
    require_possible(config, where)
    return Described(config, int(number_under(raw, "max_length", 1024, where)), "all")
