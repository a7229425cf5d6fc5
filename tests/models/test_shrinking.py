"""Weights of a smaller model from a larger one. If this breaks, a student begins with the wrong layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from modernbert_train.config.schema import (
    AlbertConfig,
    BertConfig,
    DistilBertConfig,
    GemmaConfig,
    MaskedLmConfig,
    ModelConfig,
    ModernBertConfig,
)
from modernbert_train.errors import ConfigError
from modernbert_train.models.build import build_model
from modernbert_train.models.init import initialize
from modernbert_train.models.shrinking import check_shrinking, kept_layers, shrink_each
from modernbert_train.models.tiling import grow
from tests.support.encoder_training import pack, sequences
from tests.support.encoders import BERT, DEBERTA, ENCODERS, LLAMAS, MODERNBERT, XLNET


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
        (replace(MODERNBERT, num_layers=7), MODERNBERT),
        (LLAMAS["untied"], replace(LLAMAS["untied"], num_layers=2)),
        (BERT, replace(BERT, num_layers=2)),
        (BERT, replace(ENCODERS["distilbert"], num_layers=2)),
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


def test_a_model_that_was_grown_shrinks_to_itself() -> None:
    """Center tiling repeats heads, channels and hidden units; shrinking a tiled model restores the smaller one.

    Their order may differ, so outputs are compared and not tensors.
    """
    small, large = MODERNBERT, replace(MODERNBERT, hidden_size=128, num_heads=4, intermediate_size=96)
    models = [build_model(each, MaskedLmConfig()).eval() for each in (small, large, small)]
    initialize(models[0], small, seed=1)
    models[1].load_state_dict(grow(models[0].state_dict(), small, large))
    models[2].load_state_dict(dict(shrink_each(models[1].state_dict(), large, small)))
    packed = pack([sequences([20, 9])], row_tokens=29).packed
    said, again = (model.logits(model.encode(packed), torch.arange(29)) for model in models[::2])
    torch.testing.assert_close(again, said)


@pytest.mark.parametrize(
    "old",
    [BERT, replace(DEBERTA, convolution=3), XLNET, replace(LLAMAS["untied"], key_value_heads=None)],
    ids=lambda config: config.name,
)
def test_what_is_kept_of_a_matrix_is_reported(old: ModelConfig) -> None:
    """Of four heads of four channels the first and the last, of six hidden units 0, 2, 3 and 5: by hand."""
    old = replace(old, hidden_size=16, num_layers=2, num_heads=4, intermediate_size=6)
    new = replace(old, hidden_size=8, num_heads=2, intermediate_size=4)
    check_shrinking(old, new, "here")
    channels, hidden = [0, 1, 2, 3, 12, 13, 14, 15], [0, 2, 3, 5]
    large, small = (build_model(each, MaskedLmConfig()) for each in (old, new))
    weights = {name: torch.randn(tensor.shape) for name, tensor in large.state_dict().items()}
    found = dict(shrink_each(weights, old, new))
    assert {name: tensor.shape for name, tensor in found.items()} == {
        name: tensor.shape for name, tensor in small.state_dict().items()
    }
    table = "model.embeddings.tok_embeddings.weight"
    assert torch.equal(found[table], weights[table][:, channels])
    for layer in ("model.layers.0.", "model.layers.1."):
        gated = weights[layer + "mlp.Wi.weight"].unflatten(0, (-1, 6))[:, hidden][:, :, channels]
        assert torch.equal(found[layer + "mlp.Wi.weight"], gated.flatten(0, 1))
        assert torch.equal(found[layer + "mlp.Wo.weight"], weights[layer + "mlp.Wo.weight"][channels][:, hidden])
        fused, parts = ("attn.Wkv.weight", 2) if old.name == "llama" else ("attn.Wqkv.weight", 3)
        of_heads = weights[layer + fused].unflatten(0, (parts, 4, 4))[:, [0, 3]]
        assert torch.equal(found[layer + fused], of_heads.flatten(0, 2)[:, channels])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            BertConfig(),
            BertConfig(hidden_size=384),
            "hidden_size=384 with model.num_heads=12: .* set model.num_heads=6",
        ),
        (BertConfig(), BertConfig(vocab_size=100, num_layers=6), "model.vocab_size=100 here, 30522 there"),
        (DistilBertConfig(), BertConfig(num_layers=3), "model.name=bert here, distilbert there"),
        (BertConfig(), BertConfig(), "model.num_layers=12 here, 12 there, and the same width: set fewer"),
        (BertConfig(position_offset=2), DistilBertConfig(), "counts positions from 0, the larger model from 2"),
        (AlbertConfig(), AlbertConfig(num_layers=6), "its layers share weights"),
    ],
)
def test_what_is_no_smaller_model_is_refused(old: ModelConfig, new: ModelConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^here: (.|\n)*{message}"):
        check_shrinking(old, new, "here")
