"""ModernBERT-base and -large at their real sizes against transformers, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from modernbert_train.config.schema import ModernBertConfig
from tests.models.encoders import assert_same_gradients, build, twin_of

Make = Callable[..., Any]
BASE = ModernBertConfig(global_rope_theta=160_000.0, attention_out_dropout=0.0)
LARGE = replace(BASE, hidden_size=1024, num_layers=28, num_heads=16, intermediate_size=2624)
EDGES = [64, 65, 1, 128, 129, 637]  # every length at which windows and blocks begin and end


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("config", "lengths"),
    [
        pytest.param(BASE, EDGES, id="base"),
        pytest.param(LARGE, EDGES, id="large"),
        pytest.param(BASE, [8192, 300], id="long"),  # an error of angles or windows grows with the distance
    ],
)
def test_real_sizes_equal_transformers(
    sequences: Make, pack: Make, config: ModernBertConfig, lengths: list[int]
) -> None:
    """Hidden states, logits, and but for the long one the gradient of every weight."""
    model, apart = build(config), sequences(lengths, config.vocab_size)
    twin = twin_of(model, attention="sdpa")
    with torch.set_grad_enabled(max(lengths) < 1024):
        hidden_TD = model.encode(pack([apart], row_tokens=sum(lengths)).packed)
        theirs_TD = torch.cat([twin.base_model(ids[None]).last_hidden_state[0] for ids in apart])
        torch.testing.assert_close(hidden_TD, theirs_TD, atol=1e-5, rtol=1e-5)
        logits_MV = model.logits(hidden_TD, torch.arange(0, sum(lengths), 5))
        theirs_MV = twin.decoder(twin.head(theirs_TD[::5]))
    torch.testing.assert_close(logits_MV, theirs_MV, atol=1e-5, rtol=1e-5)
    if logits_MV.requires_grad:
        weight_MV = torch.randn(logits_MV.shape, generator=torch.Generator().manual_seed(1))
        for logits in (logits_MV, theirs_MV):
            (logits * weight_MV).mean().backward()
        ours = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        assert_same_gradients(ours, config, twin)
