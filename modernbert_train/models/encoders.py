"""Which encoder a `model` section is; a new architecture is a file beside this one and a row here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modernbert_train.config.schema import BertConfig, ComputeConfig, ModelConfig, ModernBertConfig
from modernbert_train.models.bert import Bert
from modernbert_train.models.encoder import Encoder
from modernbert_train.models.modernbert import ModernBert

ENCODERS: dict[type[ModelConfig], Callable[[Any, ComputeConfig], Encoder]] = {
    ModernBertConfig: ModernBert,
    BertConfig: Bert,
}


def build_encoder(config: ModelConfig, compute: ComputeConfig) -> Encoder:
    """An encoder without its weights."""
    return ENCODERS[type(config)](config, compute)
