"""An objective's settings of the loss reach the model: without `z_loss`, logits drift in a long run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from modernbert_train.batch import IGNORED_LABEL
from modernbert_train.config.schema import CausalLmConfig, ComputeConfig, MaskedLmConfig, ObjectiveConfig
from modernbert_train.models.build import build_model
from modernbert_train.models.heads import loss_and_gradient
from modernbert_train.models.init import initialize


@pytest.mark.parametrize("objective", [MaskedLmConfig(), CausalLmConfig()], ids=lambda each: each.name)
@torch.no_grad()
def test_z_loss_is_added_to_the_loss(
    objective: ObjectiveConfig, small: Callable[..., Any], sequences: Callable[..., Any], pack: Callable[..., Any]
) -> None:
    """z_loss times the squared log partition of each prediction, as worked out from the logits."""
    config, batch = small(num_layers=1), pack([sequences([20])], row_tokens=20)
    losses = []
    for z_loss in (0.0, 0.25):
        model = build_model(config, replace(objective, z_loss=z_loss), ComputeConfig(attention="sdpa")).eval()
        initialize(model, config, seed=3)
        losses.append(float(model(batch).losses["mlm"]))
    logits_MV = model.logits(model.encode(batch.packed), batch.targets["positions_M"])
    real_M = batch.targets["labels_M"] != IGNORED_LABEL
    expected = 0.25 * logits_MV.double().logsumexp(-1).square()[real_M].sum()
    assert losses[1] - losses[0] == pytest.approx(float(expected), rel=1e-5) and expected > 1


def test_the_loss_of_bf16_logits_is_computed_in_fp32() -> None:
    """Rounding each exponential to 8 bits would cost a hundredth of a nat, which is what recipes differ by."""
    draw = torch.Generator().manual_seed(1)
    logits_CV = torch.randn(16, 4096, generator=draw).bfloat16()
    labels_C = torch.randint(0, 4096, (16,), generator=draw)
    expected = F.cross_entropy(logits_CV.double(), labels_C, reduction="sum")
    loss, gradient_CV, _ = loss_and_gradient(logits_CV.clone(), labels_C, z_loss=0.0)
    assert loss.dtype == torch.float32 and float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert gradient_CV.dtype == torch.bfloat16
