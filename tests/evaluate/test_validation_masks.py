"""Masks of the held-out text. If these followed `objective.masking`, losses of two runs could not be compared."""

from __future__ import annotations

import torch

from modernbert_train.__main__ import read_run
from modernbert_train.clock import Clock
from tests.support.texts import texts_of
from tests.support.tiny_run import TinyRun


def test_validation_is_masked_exactly_whatever_training_does(tiny_run: TinyRun) -> None:
    """15 % of each sequence, never a special token, the same ones in every run."""
    found = {}
    for masking, seed in (("exact", 5), ("bernoulli", 5), ("reference", 6)):
        config = read_run(tiny_run(f"objective.masking={masking}", f"seed={seed}"))
        validation = texts_of(config).validation()
        plan = validation.plan(Clock.of(config).phase("long"))
        found[masking] = list(validation._maker.microbatches(plan.rows, plan))
    for masking in ("bernoulli", "reference"):
        for batch, exact in zip(found[masking], found["exact"], strict=True):
            assert torch.equal(batch.packed.input_ids_T, exact.packed.input_ids_T)
            for name in ("positions_M", "labels_M"):
                assert torch.equal(batch.targets[name], exact.targets[name])
    predicted = sum(batch.counts["mlm"] for batch in found["exact"])
    assert abs(predicted - 0.15 * 583) < 10  # 5 documents of 583 tokens, in some 10 sequences
