"""Initial weights and the parameter count. A wrong deviation trains, only worse, without a visible cause."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.models.init import initialize
from modernbert_train.models.modernbert import ModernBertForMaskedLM

# Deviation of a standard normal truncated at +-2: sqrt(1 - 2 * 2 phi(2) / (2 Phi(2) - 1)), worked by hand.
TRUNCATED_AT_2 = 0.8796


def fresh(config: ModernBertConfig, seed: int = 17) -> ModernBertForMaskedLM:
    model = ModernBertForMaskedLM(config)
    initialize(model, config, seed)
    return model


@pytest.fixture(scope="module")
def model() -> ModernBertForMaskedLM:
    return fresh(ModernBertConfig(vocab_size=1024, hidden_size=256, num_layers=4, num_heads=4, intermediate_size=384))


def test_matrices_have_the_published_deviations(model: ModernBertForMaskedLM) -> None:
    """init_std for what reads the residual stream, init_std / sqrt(2 L) for what writes to it, cut at 2 deviations."""
    seen = {True: 0, False: 0}
    for name, parameter in model.named_parameters():
        if parameter.dim() != 2:
            continue
        writes = name.endswith(("attn.Wo.weight", "mlp.Wo.weight"))
        std = 0.02 / math.sqrt(8) if writes else 0.02
        seen[writes] += 1
        assert parameter.std().item() == pytest.approx(TRUNCATED_AT_2 * std, rel=0.02), name
        assert abs(parameter.mean().item()) < 5 * std / math.sqrt(parameter.numel()), name
        assert 1.9 * std < parameter.abs().max().item() <= 2 * std, name
    assert seen == {True: 8, False: 10}  # Wo twice a layer; embedding, head.dense, and Wqkv and Wi in each layer


def test_norms_are_one_and_biases_zero(model: ModernBertForMaskedLM) -> None:
    """The decoder's bias is the only one."""
    vectors = {name: p for name, p in model.named_parameters() if p.dim() == 1}
    assert [name for name in vectors if name.endswith("bias")] == ["decoder.bias"]
    assert not vectors.pop("decoder.bias").any()
    assert len(vectors) == 2 * 4 - 1 + 3
    assert all(torch.equal(p, torch.ones_like(p)) for p in vectors.values())


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
    model = ModernBertForMaskedLM(ModernBertConfig(vocab_size=8, hidden_size=8, num_layers=1, num_heads=1))
    torch.set_rng_state(before)
    initialize(model, model.config, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
