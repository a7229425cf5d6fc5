"""ModernBERT trained in causal order, as transformers' ModernBertDecoderForCausalLM.

It has the encoder's parameters; Wqkv is stored as three matrices, and the head has another name. A local layer sees the
token itself and half of local_attention less one token before it, as this program's layers do in causal order. Decoders
trained by Ettin's code (FlexBERT) saw one token more; transformers opens them with this window too.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from modernbert_train.config.objective import Order
from modernbert_train.config.read import shown
from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.errors import DataError
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats import modernbert
from modernbert_train.weights.formats.config_json import Described

MODEL_TYPE, ARCHITECTURE = "modernbert-decoder", "ModernBertDecoderForCausalLM"

# keys of the encoder's config.json that a decoder lacks
_ENCODER_ONLY = ("classifier_pooling",)


def theirs(name: str, config: ModernBertConfig) -> tuple[str, ...]:
    """See `HubFormat`."""
    if name.endswith(".attn.Wqkv.weight"):
        return tuple(name.replace("Wqkv", f"{part}_proj") for part in "qkv")
    return tuple(f"lm_{each}" if each.startswith("head.") else each for each in modernbert.theirs(name, config))


def today(name: str) -> str | None:
    """See `HubFormat`."""
    return modernbert.EMBEDDING if name == modernbert.DECODER else name


def describe(
    config: ModernBertConfig, order: Order, modules: Collection[str], max_tokens: int, vocabulary: Vocabulary
) -> dict[str, Any]:
    """See `HubFormat`; the sliding window is informative: transformers computes it from local_attention."""
    encoder = modernbert.describe(config, order, modules, max_tokens, vocabulary)
    return {
        **{key: value for key, value in encoder.items() if key not in _ENCODER_ONLY},
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "sliding_window": config.half_window,
    }


def read(raw: dict[str, Any], where: str) -> Described:
    """See `HubFormat`."""
    model = modernbert.architecture(raw, where, MODEL_TYPE, ARCHITECTURE)
    if raw.get("local_attention", model.local_attention) is None:
        raise DataError(f"{where}: local_attention=None; this encoder has local layers. Name another model.")
    if raw.get("sliding_window", model.half_window) != model.half_window:
        raise DataError(
            f"{where}: sliding_window={shown(raw['sliding_window'])}; with local_attention={model.local_attention} "
            f"this encoder only knows {model.half_window}. Name another model."
        )
    return Described(model, modernbert.max_tokens_of(raw), "causal")
