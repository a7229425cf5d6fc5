"""Held-out text is measured without dropout; base and large train with it, and would get a noisy figure."""

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
