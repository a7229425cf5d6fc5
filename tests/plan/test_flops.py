"""FLOPs, from which MFU, hours and cost follow: against torch's counter on the real model, and masks written out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.batches import mean_loss
from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.models.attention import sdpa
from modernbert_train.models.modernbert import ModernBertForMaskedLM
from modernbert_train.plan.flops import Spans, flops_per_token, mean_spans
from tests.plan.batches import make_batch

BASE = ModernBertConfig(vocab_size=2048, num_layers=4, attention_out_dropout=0.0)  # two layers of a kind
TINY = replace(BASE, vocab_size=512, hidden_size=32, num_heads=2, intermediate_size=48, local_attention=16)
LARGE = ModernBertConfig(hidden_size=1024, num_layers=28, num_heads=16, intermediate_size=2624)


def counted(config: ModernBertConfig, lengths: list[int], predicted: int) -> tuple[float, float]:
    """What torch counts per token: forward, and forward with backward. The plain attention formula, which does not
    compute scores again in its backward pass, is what torch has counts for on every device."""
    model, batch = ModernBertForMaskedLM(config), make_batch(lengths, predicted)
    with FlopCounterMode(display=False) as forward, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(batch, figures=True)  # in training the loss makes its gradients on the way forward
    with FlopCounterMode(display=False) as training, sdpa_kernel(SDPBackend.MATH):
        mean_loss(model, batch).backward()
    return forward.get_total_flops() / sum(lengths), training.get_total_flops() / sum(lengths)


@pytest.mark.runs
@pytest.mark.parametrize("config", [BASE, TINY], ids=["base", "tiny"])
def test_flops_equal_torchs_counter(config: ModernBertConfig) -> None:
    """Documents that fill the kernel's blocks, so that it computes nothing for padding. In local layers it computes a
    block of queries with all keys around it and throws away what the window hides; those keys are put in."""
    lengths, predicted = [128, 64, 192], 115
    spans = replace(mean_spans(lengths, config.half_window), local=sdpa.BLOCK_QUERIES + 2 * config.half_window)
    flops = flops_per_token(config, spans, predicted / sum(lengths))
    forward, training = counted(config, lengths, predicted)
    assert flops.forward == pytest.approx(forward, rel=0.001)
    assert flops.training == pytest.approx(training, rel=0.001)


def test_global_layers_need_no_correction() -> None:
    """With global layers alone the kernel computes the very pairs that are counted."""
    config = replace(TINY, global_attn_every_n_layers=1)
    lengths = [33, 7, 100]
    flops = flops_per_token(config, mean_spans(lengths, config.half_window), 40 / sum(lengths))
    forward, training = counted(config, lengths, 40)
    assert flops.forward == pytest.approx(forward, rel=0.001)
    assert flops.training == pytest.approx(training, rel=0.001)


def test_spans_equal_masks_written_out() -> None:
    """Windows are cut at both ends of a document, documents do not see each other, and boundaries are inclusive."""
    lengths, side = [1, 8, 9, 10, 17, 40], 8
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(sum(lengths))
    same = document[:, None] == document
    near = (place[:, None] - place).abs() <= side
    spans = mean_spans(lengths, side)
    assert spans.whole == pytest.approx(same.sum(1).double().mean().item())
    assert spans.local == pytest.approx((same & near).sum(1).double().mean().item())


@pytest.mark.parametrize(
    ("config", "length", "gflop"),
    [
        (ModernBertConfig(), 1024, 0.8241),
        (ModernBertConfig(), 8192, 1.3530),
        (LARGE, 1024, 2.3071),
        (LARGE, 8192, 3.1887),
    ],
)
def test_the_published_sizes_by_hand(config: ModernBertConfig, length: int, gflop: float) -> None:
    """Worked out by hand once: base and large, one document a row, 30 % predicted."""
    flops = flops_per_token(config, mean_spans([length], config.half_window), 0.3)
    assert flops.training / 1e9 == pytest.approx(gflop, abs=1e-4)


def test_parts_add_up() -> None:
    flops = flops_per_token(TINY, Spans(100, 10), 0.0)
    assert flops.head == 0.0
    assert flops.global_attention == 4 * 32 * 2 * 100 and flops.local_attention == 4 * 32 * 2 * 10
    assert flops.forward == flops.layers + flops.global_attention + flops.local_attention
