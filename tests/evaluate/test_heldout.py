"""Held-out text is measured without dropout, and with the same masks in every run.

With dropout, base and large, which train with it, would get a noisy figure; with masks that followed
`objective.masking`, losses of two runs could not be compared.
"""

from __future__ import annotations

import torch
from torch import nn

from modernbert_train.__main__ import read_run
from modernbert_train.clock import Clock
from modernbert_train.distributed.compute import Compute
from modernbert_train.models.build import build_model
from modernbert_train.models.init import initialize
from tests.support.texts import texts_of
from tests.support.tiny_run import TinyRun


def test_dropout_changes_no_figure_and_training_continues_with_it(tiny_run: TinyRun) -> None:
    losses = []
    for dropout in (0.0, 0.5):
        config = read_run(tiny_run(f"model.attention_out_dropout={dropout}"))
        compute = Compute(torch.device("cpu"), "fp32")
        model = build_model(config.model, config.objective, config.compute).train()
        initialize(model, config.model, seed=3)
        torch.manual_seed(1)
        validation = texts_of(config).validation()
        losses.append(validation.evaluate(model, Clock.of(config).phase("short"), compute).loss)
        assert all(module.training for module in model.modules())
    assert any(isinstance(module, nn.Dropout) and module.p == 0.5 for module in model.modules())
    assert losses[0] == losses[1]


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
