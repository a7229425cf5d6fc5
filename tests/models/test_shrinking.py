"""Weights of a smaller model out of a larger one. If this breaks, a student begins with layers that nobody named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from modernbert_train.config.schema import (
    AlbertConfig,
    BertConfig,
    DistilBertConfig,
    GemmaConfig,
    LlamaConfig,
    MaskedLmConfig,
    ModelConfig,
    ModernBertConfig,
)
from modernbert_train.errors import ConfigError
from modernbert_train.models.build import build_model
from modernbert_train.models.init import initialize
from modernbert_train.models.shrinking import check_shrinking, kept_layers, shrink_each

SHAPE = {"vocab_size": 64, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48}


def test_layers_are_those_of_the_published_distilbert() -> None:
    """As scripts/extract_distilbert.py of Hugging Face's research projects has them."""
    assert kept_layers(BertConfig(), DistilBertConfig()) == [0, 2, 4, 7, 9, 11]
    assert kept_layers(BertConfig(), BertConfig(num_layers=1)) == [0]


@pytest.mark.parametrize(("old", "num_layers"), [(ModernBertConfig(), 10), (GemmaConfig(), 12)])
def test_global_layers_come_from_global_ones(old: ModelConfig, num_layers: int) -> None:
    """The two kinds have other windows and RoPE bases, and have learned with them."""
    new = replace(old, num_layers=num_layers)
    found = kept_layers(old, new)
    assert len({*found}) == num_layers and (found[0], found[-1]) == (0, old.num_layers - 1)
    assert all(old.is_global(source) is new.is_global(layer) for layer, source in enumerate(found))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (ModernBertConfig(**SHAPE, num_layers=7), ModernBertConfig(**SHAPE, num_layers=4)),
        (LlamaConfig(**SHAPE, num_layers=4, tied=False), LlamaConfig(**SHAPE, num_layers=2, tied=False)),
        (BertConfig(**SHAPE, num_layers=4), BertConfig(**SHAPE, num_layers=2)),
        (BertConfig(**SHAPE, num_layers=4), DistilBertConfig(**SHAPE, num_layers=2)),
    ],
    ids=["modernbert", "llama", "bert", "distilbert"],
)
def test_what_is_taken_is_the_same_to_the_bit(old: ModelConfig, new: ModelConfig) -> None:
    check_shrinking(old, new, "here")
    large, small = (build_model(each, MaskedLmConfig()) for each in (old, new))
    initialize(large, old, seed=3)
    weights = {name: tensor + 0.1 for name, tensor in large.state_dict().items()}  # biases too
    found = dict(shrink_each(weights, old, new))
    assert found.keys() == small.state_dict().keys()
    for name, tensor in found.items():
        source = name
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            source = f"model.layers.{kept_layers(old, new)[int(layer)]}.{rest}"
        expected = weights[source]
        if name.endswith("position_embeddings.weight") and new.name == "distilbert":
            expected = expected + weights["model.embeddings.segment_embeddings.weight"][0]
        assert torch.equal(tensor, expected), name


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (BertConfig(), BertConfig(hidden_size=384, num_layers=6), "model.hidden_size=384 here, 768 there"),
        (DistilBertConfig(), BertConfig(num_layers=3), "model.name=bert here, distilbert there"),
        (BertConfig(), BertConfig(), "model.num_layers=12 here, 12 there: set fewer"),
        (BertConfig(position_offset=2), DistilBertConfig(), "whose positions count from 0; there from 2"),
        (AlbertConfig(), AlbertConfig(num_layers=6), "its layers share weights"),
    ],
)
def test_what_is_no_smaller_model_is_refused(old: ModelConfig, new: ModelConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^here: (.|\n)*{message}"):
        check_shrinking(old, new, "here")
