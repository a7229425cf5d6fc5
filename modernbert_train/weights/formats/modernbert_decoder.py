"""ModernBERT trained in causal order, as transformers' ModernBertDecoderForCausalLM.

It has the encoder's parameters; Wqkv is stored as three matrices, and the head has another name. A local layer sees the
token itself and half of local_attention less one token before it, as this program's layers do in causal order. Decoders
trained by Ettin's code (FlexBERT) saw one token more; transformers opens them with this window too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from modernbert_train.config.objective import Order
from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.errors import DataError
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats import modernbert
from modernbert_train.weights.formats.config_json import Content


def _names(name: str, config: ModernBertConfig) -> tuple[str, ...]:
    if name.endswith(".attn.Wqkv.weight"):
        return tuple(name.replace("Wqkv", f"{part}_proj") for part in "qkv")
    return tuple(f"lm_{each}" if each.startswith("head.") else each for each in modernbert.names(name, config))


def _more(config: ModernBertConfig, order: Order, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return further keys; the sliding window is informative: transformers computes it from local_attention."""
    more = modernbert.more(config, order, vocabulary) | {"sliding_window": config.half_window}
    return {key: value for key, value in more.items() if key != "classifier_pooling"}


def _build(raw: Content, fields: dict[str, Any], order: Order, longest: int) -> tuple[ModernBertConfig, Order]:
    model, order = modernbert.build(raw, fields, order, longest)
    if raw.get("local_attention", model.local_attention) is None:
        raise DataError(f"{raw.where}: local_attention=None; this encoder has local layers. Name another model.")
    if raw.get("sliding_window", model.half_window) != model.half_window:
        window = f"with local_attention={model.local_attention} "
        raise raw.unknown(model.half_window, "sliding_window", given=window)
    return model, order


FORMAT = replace(
    modernbert.FORMAT,
    model_type="modernbert-decoder",
    classes={"causal": "ModernBertDecoderForCausalLM"},
    renamed={},
    names=_names,
    more=_more,
    build=_build,
)
