"""What a step is said to cost: a wrong figure here sends people to optimise what is not slow."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from modernbert_train.config.load import load_run
from modernbert_train.config.schema import ModelConfig
from modernbert_train.data.packing import SPECIAL_TOKENS, Piece
from modernbert_train.data.planner import BatchPlan, StreamCount
from modernbert_train.train import meter
from modernbert_train.train.meter import Meter, peak_flops, training_flops
from tests.conftest import TinyRun

MODEL = ModelConfig(vocab_size=512, hidden_size=32, num_layers=4, num_heads=2, intermediate_size=48, local_attention=16)
ROWS = ((Piece(0, 0, 0, 5), Piece(0, 1, 0, 40)), (Piece(0, 2, 0, 61),))


def test_flops_are_those_of_the_pairs_of_tokens_that_see_each_other() -> None:
    """Counted pair by pair and product by product: padding, and tokens beyond a window, must not count."""
    width, hidden, predicted = 32, 48, 30
    lengths = [piece.length + SPECIAL_TOKENS for row in ROWS for piece in row]
    pairs = {
        window: sum(
            1
            for n in lengths
            for i, j in itertools.product(range(n), repeat=2)
            if window is None or abs(i - j) <= window
        )
        for window in (None, 8)
    }
    weights = width * 3 * width + width * width + width * 2 * hidden + hidden * width
    forward = 0
    for layer in range(4):
        forward += 2 * sum(lengths) * weights
        forward += 2 * 2 * width * pairs[None if layer in (0, 3) else 8]
    forward += 2 * predicted * (width * width + width * 512)
    assert training_flops(ROWS, predicted, MODEL) == pytest.approx(3 * forward, rel=1e-12)


def test_the_peak_is_known_only_where_the_datasheet_is() -> None:
    """An MFU against another card's peak is worse than none: H100 NVL and H200 NVL are slower than their namesakes."""
    assert peak_flops("NVIDIA H100 80GB HBM3", "amp_bf16") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "amp_bf16") == 312e12
    assert peak_flops("NVIDIA H100 NVL", "amp_bf16") is None
    assert peak_flops("NVIDIA H100 80GB HBM3", "fp32") is None
    assert peak_flops("cpu", "fp32") is None


@pytest.fixture
def a_meter(tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> Meter:
    """Of a run of 6,000 tokens, on a GPU that makes 1e9 FLOP/s; its clock is ticked by `steps`."""
    monkeypatch.setattr(meter, "peak_flops", lambda name, precision: 1e9)
    file, *_ = tiny_run()
    return Meter(load_run([file]), torch.device("cpu"), "fp32")


def steps(a_meter: Meter, monkeypatch: pytest.MonkeyPatch, ends: list[float]) -> list[dict[str, Any]]:
    """Steps of 1,000 tokens each that end at the given times."""
    found = []
    for number, end in enumerate(ends):
        monkeypatch.setattr(meter.time, "monotonic", lambda end=end: end)
        plan = BatchPlan("short", 1000 * number, 1000, (), 20, 64, 2, 0.3, (StreamCount("train", 0, 900, 9),))
        found.append(a_meter.measure(plan, ROWS, 30, seconds=2.0, wait_seconds=0.5))
    return found


def test_shares_and_rates_of_a_step(a_meter: Meter, monkeypatch: pytest.MonkeyPatch) -> None:
    (entry,) = steps(a_meter, monkeypatch, [100.0])
    assert entry["rank_flops_per_second"] == training_flops(ROWS, 30, MODEL) / 2
    assert entry["mfu"] == pytest.approx(entry["rank_flops_per_second"] / 1e9)
    assert entry["tokens_per_second"] == 500
    assert entry["data_wait_share"] == 0.25
    assert entry["packing_efficiency"] == pytest.approx(1000 / (20 * 64))
    assert entry["epoch"] == 0 and 1e7 < entry["peak_memory_bytes"] < 1e12


def test_time_left_forgets_the_first_step(a_meter: Meter, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step compiles; a finish time that counts it is hours off. What happens between steps does count."""
    found = steps(a_meter, monkeypatch, [100.0, 103.0, 110.0, 112.0, 113.0, 115.0, 117.0])
    left = [entry["seconds_left"] for entry in found]
    assert left[0] == 2.0 * 5  # of the step itself: 2 s for 1,000 of the 6,000 tokens
    assert left[1] == 3.0 * 4
    assert left[2] == (10.0 / 2) * 3
    assert left[5:] == [0.0, 0.0]  # the end, and a batch beyond it
