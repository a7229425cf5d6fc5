"""The counts of parameters that memory, checkpoints and the model's card are worked out from."""

from __future__ import annotations

import pytest
import torch

from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.models.modernbert import EncoderLayer, ModernBertForMaskedLM
from modernbert_train.plan.parameters import count_parameters

LARGE = ModernBertConfig(hidden_size=1024, num_layers=28, num_heads=16, intermediate_size=2624)
TINY = ModernBertConfig(vocab_size=512, hidden_size=32, num_layers=4, num_heads=2, intermediate_size=48)


@pytest.mark.parametrize("config", [ModernBertConfig(), LARGE, TINY], ids=["base", "large", "tiny"])
def test_counts_equal_the_real_model(config: ModernBertConfig) -> None:
    """Every part, because memory of shards and what is gathered follow from the parts."""
    with torch.device("meta"):
        model = ModernBertForMaskedLM(config)
    counts = count_parameters(config)

    def numel(module: torch.nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    assert counts.total == numel(model)
    assert counts.embedding == numel(model.model.embeddings.tok_embeddings)
    assert counts.layers == numel(model.model.layers)
    layer = model.model.layers[1]
    assert isinstance(layer, EncoderLayer) and counts.layer == numel(layer)
    assert counts.matrices == sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2)
    assert counts.active == counts.total - counts.embedding
    assert counts.root + counts.layers == counts.total


def test_the_published_sizes() -> None:
    assert count_parameters(ModernBertConfig()).total == 149_655_232
    assert count_parameters(LARGE).total == 395_881_664
