"""Initial weights and the parameter count. A wrong deviation trains, only worse, without a visible cause."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from modernbert_train.config.schema import BertConfig, ModelConfig, ModernBertConfig, NeoBertConfig, XLNetConfig
from modernbert_train.models.build import build_model
from modernbert_train.models.init import count_parameters, initialize
from modernbert_train.models.masked_lm import ForMaskedLM
from modernbert_train.plan import parameters as planned
from tests.support.encoders import objective_of

# Deviation of a standard normal truncated at +-2: sqrt(1 - 2 * 2 phi(2) / (2 Phi(2) - 1)), worked by hand.
TRUNCATED_AT_2 = 0.8796


WIDE: dict[str, Any] = {"vocab_size": 1024, "hidden_size": 256, "num_heads": 4, "intermediate_size": 384}


def fresh(config: ModelConfig, seed: int = 17) -> ForMaskedLM:
    model = build_model(config, objective_of(config))
    initialize(model, config, seed)
    return model


@pytest.mark.parametrize(
    ("config", "writes"),
    [
        (ModernBertConfig(num_layers=4, **WIDE), ("attn.Wo.weight", "mlp.Wo.weight")),
        (BertConfig(num_layers=2, **WIDE), ()),
        (XLNetConfig(num_layers=2, **WIDE), ()),
    ],
    ids=["modernbert", "bert", "xlnet"],
)
def test_weights_have_the_published_deviations(config: ModelConfig, writes: tuple[str, ...]) -> None:
    """init_std for what reads the residual stream, cut at 2 deviations; in a ModernBERT init_std / sqrt(2 L) for what
    writes to it. Biases of XLNet's queries and its vector of query tokens too; other biases zero, norms one."""
    seen = 0
    for name, parameter in fresh(config).named_parameters():
        if parameter.dim() == 1:
            assert (parameter == (0.0 if name.endswith("bias") else 1.0)).all(), name
        elif parameter.numel() > 512:
            std, large = 0.02 / math.sqrt(8) if name.endswith(writes) else 0.02, parameter.numel() > 10_000
            seen += name.endswith(writes)
            assert parameter.std().item() == pytest.approx(TRUNCATED_AT_2 * std, rel=0.02 if large else 0.12), name
            assert abs(parameter.mean().item()) < 5 * std / math.sqrt(parameter.numel()), name
            assert (1.9 * std if large else 0) < parameter.abs().max().item() <= 2 * std, name
    assert seen == config.num_layers * len(writes)


def test_a_weight_depends_on_its_name_and_the_seed_alone() -> None:
    """Adding layers, another order, or drawing elsewhere in the process must not change a single weight."""
    shape: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "num_heads": 1, "intermediate_size": 32}
    four, same = (fresh(ModernBertConfig(num_layers=4, **shape)).state_dict() for _ in range(2))
    torch.manual_seed(123)
    seven = fresh(ModernBertConfig(num_layers=7, **shape)).state_dict()
    other = fresh(ModernBertConfig(num_layers=4, **shape), seed=18).state_dict()
    for name, weight in four.items():
        assert torch.equal(weight, same[name])
        if not name.endswith("Wo.weight"):  # whose deviation depends on the depth
            assert torch.equal(weight, seven[name]), name
        if weight.dim() == 2:
            assert not torch.equal(weight, other[name]), name
    assert not torch.equal(four["model.layers.1.attn.Wo.weight"], four["model.layers.2.attn.Wo.weight"])


def test_drawing_leaves_the_global_generator_alone() -> None:
    """Initialising must not shift dropout or data on the ranks that do it."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    config = ModernBertConfig(vocab_size=8, hidden_size=8, num_layers=1, num_heads=1)
    model = build_model(config, objective_of(config))
    torch.set_rng_state(before)
    initialize(model, config, seed=1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.runs
def test_weights_of_a_neobert_are_uniform_as_published() -> None:
    """Within 0.02 of zero and as often at the edge as in the middle; the decoder's bias is zero."""
    config = NeoBertConfig(num_layers=1, hidden_size=64, num_heads=1, intermediate_size=64)
    model = fresh(config)
    assert count_parameters(model) == planned.count_parameters(config).total
    table = model.get_parameter("model.embeddings.tok_embeddings.weight").flatten()
    counts = torch.histc(table, bins=10, min=-0.02, max=0.02)
    assert counts.sum() == len(table)
    torch.testing.assert_close(counts / len(table), torch.full((10,), 0.1), atol=1e-3, rtol=0)
    assert not model.get_parameter("decoder.bias").any()
