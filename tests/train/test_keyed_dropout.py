"""Dropout of a step is keyed by the step. With one key for all steps the same neurons would be dropped for ever."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.batches import lay_out, mlm_batch
from modernbert_train.batch import Batch, Sums
from modernbert_train.config.schema import RunConfig
from modernbert_train.train.adapters import ComposerObjective
from modernbert_train.train.callbacks import key_dropout


class Dropped(nn.Module):
    """What dropout leaves of ones is its loss."""

    encoders = ()

    def forward(self, batch: Batch, figures: bool = False) -> Sums:
        return Sums({"mlm": nn.functional.dropout(torch.ones(64), 0.5)}, {})


def drawn(config: RunConfig, steps: int, microbatches: int = 2) -> list[Tensor]:
    """Of the microbatches of the step after so many, in a process that has drawn other numbers before."""
    torch.rand(steps + 7)
    adapter = ComposerObjective(Dropped())  # type: ignore[arg-type]
    key_dropout(config, adapter.train(), steps)
    nothing = torch.zeros(0, dtype=torch.int64)
    batch = mlm_batch(lay_out(torch.arange(5, 9), [0, 4], 4), nothing, nothing, num_tokens=4, num_rows=1)
    return [adapter(batch).losses["mlm"] for _ in range(microbatches)]


def test_every_step_and_microbatch_drops_others_and_the_same_again_when_repeated() -> None:
    config = RunConfig(seed=5)
    found = [mask for steps in range(3) for mask in drawn(config, steps)] + drawn(RunConfig(seed=6), 0)
    for first in range(len(found)):
        for second in range(first):
            assert not torch.equal(found[first], found[second]), (first, second)
    for mask, again in zip(drawn(config, 1), found[2:4], strict=True):
        assert torch.equal(mask, again)
