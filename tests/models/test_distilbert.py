"""DistilBERT's config.json. Its outputs are compared in test_every_encoder.py and tests/weights/formats."""

from __future__ import annotations

from typing import Any

from modernbert_train.config.bert import DistilBertConfig
from modernbert_train.weights.formats import read

# the config.json of distilbert-base-uncased, without what describes the file
PUBLISHED: dict[str, Any] = {
    "activation": "gelu", "architectures": ["DistilBertForMaskedLM"], "attention_dropout": 0.1, "dim": 768,
    "dropout": 0.1, "hidden_dim": 3072, "initializer_range": 0.02, "max_position_embeddings": 512,
    "model_type": "distilbert", "n_heads": 12, "n_layers": 6, "pad_token_id": 0, "qa_dropout": 0.1,
    "seq_classif_dropout": 0.2, "sinusoidal_pos_embds": False, "tie_weights_": True, "vocab_size": 30522,
}  # fmt: skip


def test_the_published_configuration_is_read() -> None:
    said = read(PUBLISHED, "there")
    assert said.model == DistilBertConfig() and (said.order, said.max_tokens) == ("all", 512)
