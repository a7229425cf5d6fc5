"""The encoder against transformers' ModernBERT and against itself under every switch."""

from __future__ import annotations

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from benchmarks.batches import mean_loss
from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.models.layers import rotary_tables, rotate
from tests.support.encoder_training import pack, sequences, small
from tests.support.encoders import build


def test_rotary_tables_tell_long_positions_apart_in_bf16() -> None:
    """bf16 holds integers up to 256: angles computed in it would place thousands of tokens at the same position."""
    exact = rotary_tables(torch.arange(8000, 8192), 160_000.0, 64, torch.float32)
    rounded = rotary_tables(torch.arange(8000, 8192), 160_000.0, 64, torch.bfloat16)
    for table, expected in zip(rounded, exact, strict=True):
        assert torch.equal(table, expected.to(torch.bfloat16))
    assert len(rounded[0][:, 0].unique()) > 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotary_positions_equal_the_equation_to_the_bit(dtype: torch.dtype) -> None:
    """Written so that a compiler makes one kernel from it; its result and gradient equal the form with halves."""
    generator = torch.Generator().manual_seed(0)
    qk, outer = (torch.randn(50, 2, 3, 32, generator=generator, dtype=dtype, requires_grad=True) for _ in range(2))
    cos_TE, sin_T2E = rotary_tables(torch.arange(50), 10_000.0, 32, dtype)
    cos, sin = cos_TE[:, None, None].float(), sin_T2E[:, None, None, 1].float()
    first, second = qk.float().chunk(2, dim=-1)
    plain = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(dtype)
    turned = rotate(qk, cos_TE, sin_T2E)
    assert torch.equal(turned, plain)
    grads = [torch.autograd.grad(each, qk, outer)[0] for each in (turned, plain)]
    assert torch.equal(*grads)


def test_dropout_follows_the_output_projection_and_leaves_the_residual_alone() -> None:
    """As in the release: before the projection, or on the sum, it would be another recipe with the same loss curve at
    first. With the feed-forward silenced, each number that a layer adds is 0 or the undropped one over 1 - p."""
    model = build(small(attention_out_dropout=0.5))
    layer = model.model.layers[1]
    torch.nn.init.zeros_(layer.mlp.Wo.weight)
    kernel, tokens = SimpleNamespace(attend=lambda q, k, v, layout, window: v), 40  # any attention ends at Wo
    x_TD = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(6))
    rotary = rotary_tables(torch.arange(tokens), 10_000.0, 32, torch.float32)

    def added() -> Tensor:
        return (layer(x_TD, None, rotary, kernel, None)[0] - x_TD).detach()

    whole = added()
    model.train()
    dropped = added()
    kept = dropped != 0
    assert 0.4 < kept.float().mean() < 0.6
    torch.testing.assert_close(dropped, torch.where(kept, whole / 0.5, 0.0), atol=1e-5, rtol=1e-5)


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_layers_equal_eager_ones() -> None:
    """compute.compile changes only the speed: names, loss and gradients are equal; bases and scaling act."""
    config: ModernBertConfig = small(num_layers=4)
    batch = pack([sequences([50, 20])], row_tokens=96)
    eager, compiled = build(config), build(config)
    compiled.compile_layers()
    assert list(compiled.state_dict()) == list(eager.state_dict())
    yarn = {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_tokens": 32}
    seen = []
    for phase in ({"global_rope_theta": 10_000.0}, {"global_rope_theta": 160_000.0}, yarn):
        losses = []
        for model in (eager, compiled):
            model.set_phase(replace(config, **phase))
            model.zero_grad()
            loss = mean_loss(model, batch)
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
        seen.append(losses[0])
        for (name, p), (_, q) in zip(eager.named_parameters(), compiled.named_parameters(), strict=True):
            assert (p.grad - q.grad).norm() <= 1e-5 * p.grad.norm(), name
    assert len(set(seen)) == 3
