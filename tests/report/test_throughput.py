"""Speed, FLOPs and time left of a step: a wrong figure makes people optimise a part that is not slow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from modernbert_train.config.load import load_run
from modernbert_train.config.schema import MaskedLmConfig, ModernBertConfig
from modernbert_train.data.packing import Chunk
from modernbert_train.data.planner import BatchPlan, StreamCount
from modernbert_train.distributed.compute import Compute
from modernbert_train.plan.census import census
from modernbert_train.plan.flops import flops_per_token, mean_spans
from modernbert_train.report import throughput
from modernbert_train.report.throughput import Meter, peak_flops, training_flops
from tests.support.tiny_run import TinyRun

MODEL = ModernBertConfig(
    vocab_size=512, hidden_size=32, num_layers=4, num_heads=2, intermediate_size=48, local_attention=16
)
MLM = MaskedLmConfig()
Steps = Callable[..., list[dict[str, Any]]]  # of the fixture `steps`
ROWS = ((Chunk(0, 0, 0, 5), Chunk(0, 1, 0, 40)), (Chunk(0, 2, 0, 61),))


def test_flops_are_those_of_the_true_lengths() -> None:
    """Special tokens count and padding does not; tests/plan/test_flops.py holds the formula against torch's counter."""
    lengths, model = [7, 42, 63], census(MODEL, MLM)
    each = flops_per_token(model, mean_spans(lengths, model), {"tokens": 30 / sum(lengths)})
    assert training_flops(ROWS, {"mlm": 30}, MODEL, MLM) == pytest.approx(sum(lengths) * each.training, rel=1e-12)


def test_the_peak_is_known_only_where_the_datasheet_is() -> None:
    """An MFU against another GPU's peak is worse than none: H100 NVL and H200 NVL are slower than their namesakes."""
    assert peak_flops("NVIDIA H100 80GB HBM3", "amp_bf16") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "amp_bf16") == 312e12
    assert peak_flops("NVIDIA H100 NVL", "amp_bf16") is None
    assert peak_flops("NVIDIA H100 80GB HBM3", "fp32") is None
    assert peak_flops("cpu", "fp32") is None


@pytest.fixture
def steps(tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Return a function that records steps of 10 tokens with these durations, of a run of 6,000 on a GPU with 1e9
    FLOP/s; before some of them, time passes for something else."""
    monkeypatch.setattr(throughput, "peak_flops", lambda name, precision: 1e9)
    config = load_run([tiny_run()[0]])
    meter = Meter(config.model, config.total_tokens, Compute(torch.device("cpu"), "fp32"))

    def record(seconds: list[float], between: dict[int, float] | None = None) -> list[dict[str, Any]]:
        found, now = [], 100.0
        for number, each in enumerate(seconds):
            now += each + (between or {}).get(number, 0.0)
            monkeypatch.setattr(throughput.time, "monotonic", lambda now=now: now)
            plan = BatchPlan("short", 10 * number, 10, (), 20, 64, 2, MLM, (StreamCount("train", 0, 9, 9),))
            found.append(meter.measure(plan, ROWS, {"mlm": 30}, seconds=each, wait_seconds=each / 4))
        return found

    return record


def left(found: list[dict[str, Any]]) -> list[float]:
    """Return the seconds a step that the time left assumes, for a run of 6,000 tokens and steps of 10."""
    return [entry["seconds_left"] / (600 - number) for number, entry in enumerate(found, 1)]


def test_time_left_follows_the_present_speed(steps: Steps) -> None:
    """If a machine slows down or recovers, that must show within minutes and not after 500 steps."""
    found = left(steps([1.0] * 300 + [3.0] * 60))
    assert found[299] == pytest.approx(1.0) and found[-1] == pytest.approx(3.0)


def test_time_left_forgets_what_compiles(steps: Steps) -> None:
    """The first step of a process and of a phase compile; counting them makes the time hours too long."""
    found = left(steps([90.0, *[1.0] * 30, 60.0, *[1.0] * 30]))
    assert found[0] == 90.0 and found[1:] == [pytest.approx(1.0)] * 61


def test_time_left_counts_waits_that_come_again_and_again(steps: Steps) -> None:
    """Four workers that are too slow make every fourth step wait; that belongs to the run's speed."""
    found = left(steps([1.0, 1.0, 1.0, 5.0] * 40))
    assert 1.6 < found[-1] < 2.1


def test_validations_and_checkpoints_count_by_their_share_and_not_at_once(steps: Steps) -> None:
    found = left(steps([10.0] * 100, {5: 60.0} | dict.fromkeys(range(10, 100, 10), 60.0)))
    assert found[4] == pytest.approx(10.0)
    assert 10.0 < found[5] < 11.5  # the first validation took a minute and hardly changes the estimate
    assert found[-1] == pytest.approx(10.0 * (990 + 600) / 990, rel=0.01)


def test_no_time_is_left_at_the_end_nor_beyond_it(steps: Steps) -> None:
    found = steps([1.0] * 602)
    assert [entry["seconds_left"] for entry in found[-3:]] == [0.0, 0.0, 0.0]
