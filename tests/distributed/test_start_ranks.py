"""Initial weights on sharded ranks: a run's start must not depend on the sharding, nor take a whole model's memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from modernbert_train.__main__ import read_run
from modernbert_train.models.init import initialize
from modernbert_train.models.modernbert import ModernBertForMaskedLM
from modernbert_train.models.tiling import grow_each
from modernbert_train.train.build_trainer import build_model
from tests.support import sources
from tests.support.runs import launch, weights
from tests.support.sources import LARGER
from tests.support.tiny_run import TinyRun

STILL = (*sources.STILL, "data.validation=null", "distributed.strategy=fsdp2")


def test_a_run_builds_what_it_will_shard_without_memory(tiny_run: TinyRun) -> None:
    """The launched runs go this way; that they take no memory there cannot be seen from them."""
    for sharded in (True, False):
        model = build_model(read_run(tiny_run()), sharded=sharded)
        assert {parameter.is_meta for parameter in model.parameters()} == {sharded}


@pytest.mark.weekly
@pytest.mark.timeout(200)
@pytest.mark.slow
def test_sharded_ranks_start_with_the_weights_of_one(tiny_run: TinyRun, tmp_path: Path) -> None:
    """2 and 4 ranks have the random weights that one process draws, and 2 the ones grown from what 4 of them saved."""

    def assert_start(name: str, ranks: int, expected: dict[str, Tensor], *words: str) -> None:
        launch(tiny_run(*STILL, f"name={name}", *words), ranks)
        found = weights(tmp_path / "runs" / name)
        assert found.keys() == expected.keys()
        for parameter, tensor in found.items():  # a rate of 1e-30 moves nothing but the zeros of the bias
            torch.testing.assert_close(tensor, expected[parameter], rtol=0, atol=1e-25)

    small, large = (read_run(tiny_run(*STILL, *words)) for words in ((), LARGER))
    model = ModernBertForMaskedLM(small.model)
    initialize(model, small.model, small.seed)
    drawn = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert len({float(tensor.std()) for tensor in drawn.values() if tensor.ndim == 2}) == 18  # each drawn by itself
    for ranks in (2, 4):
        assert_start(f"of{ranks}", ranks, drawn)
    grown = dict(grow_each(drawn, small.model, large.model))
    assert_start("grown", 2, grown, *LARGER, f"weights.grow_from={tmp_path / 'runs/of4'}")
