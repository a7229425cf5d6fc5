"""Muon where its products are in bf16: the update equals torch.optim.Muon's, and nothing waits for the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modernbert_train.optim.muon import Muon, Rule
from tests.support.gpu_parts import DEVICE, GPU_TEST, ON_GPU

pytestmark = GPU_TEST


@pytest.mark.parametrize("row_beta", [None, 0.95])
def test_a_step_in_bf16(row_beta: float | None) -> None:
    """NorMuon lacks a counterpart in torch: its update has the RMS that the scale gives."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    ours = nn.Parameter(torch.zeros(768, 256, device=DEVICE))
    theirs = nn.Parameter(ours.detach().clone())
    muon = Muon([{"params": [ours], "parts": [1]}], 1e-2, rule=Rule(row_beta=row_beta))
    torchs = torch.optim.Muon([theirs], 1e-2, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    ours.grad = theirs.grad = torch.randn(ours.shape, generator=generator, device=DEVICE)
    muon.step()
    torchs.step()
    if ON_GPU:
        torch.cuda.set_sync_debug_mode("error")
    try:
        muon.step()
    finally:
        if ON_GPU:
            torch.cuda.set_sync_debug_mode("default")
    torchs.step()
    if row_beta is None:
        assert ((ours - theirs).norm() / theirs.norm()).item() < 2e-2
    else:
        assert ours.square().mean().sqrt().item() == pytest.approx(2 * 0.2 * 1e-2, rel=0.05)
