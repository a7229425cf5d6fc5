"""Initial weights of a model that is built without memory and sharded before allocation, as a run under FSDP2 does.

If this breaks, a run's start depends on how many GPUs it had, or a large model has to fit whole on each of them.
test_start_ranks.py tests how sharded ranks get a grown start.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from modernbert_train.config.schema import ModernBertConfig, PhaseConfig, RunConfig, StableAdamWConfig
from modernbert_train.models.init import initialize
from modernbert_train.models.modernbert import ModernBertForMaskedLM
from tests.support.gloo import run_ranks

# widths that 4 ranks cannot share evenly
MODEL = ModernBertConfig(
    vocab_size=192,
    hidden_size=36,
    num_layers=4,
    num_heads=2,
    intermediate_size=22,
    local_attention=8,
    attention_out_dropout=0.0,
)


def start_sharded() -> dict[str, Tensor]:
    """Return the whole weights after a rank's part of a model was allocated and the weights were drawn."""
    with torch.device("meta"):
        model = ModernBertForMaskedLM(MODEL)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model).to_empty(device="cpu")
    initialize(model, MODEL, seed=9)
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}  # type: ignore[attr-defined]


@pytest.mark.runs
@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_weights_do_not_depend_on_how_a_model_was_sharded(num_ranks: int) -> None:
    """Bit-equal to one process's, for widths that ranks cannot share evenly."""
    whole = ModernBertForMaskedLM(MODEL)
    initialize(whole, MODEL, seed=9)
    expected = {name: parameter.detach() for name, parameter in whole.named_parameters()}
    for found in run_ranks(start_sharded, num_ranks):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_run_builds_what_it_will_shard_without_memory() -> None:
    """The launched runs of test_start_ranks.py go this way; that they take no memory there cannot be seen from them."""
    from modernbert_train.train.build import build_model

    phase = PhaseConfig(tokens=100, row_tokens=32, batch_rows=4, microbatch_tokens=32)
    config = RunConfig(name="start", model=MODEL, optim=StableAdamWConfig(lr=1.0), phases={"only": phase})
    for sharded in (True, False):
        model = build_model(config, sharded=sharded)
        assert {parameter.is_meta for parameter in model.parameters()} == {sharded}
