"""Faults without an error: a rank that is slower than all others, and one whose weights differ from theirs.

If this breaks, a thousand GPUs wait for one for weeks, or train on a broken one's weights.
"""

from __future__ import annotations

import contextlib
import io
import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from modernbert_train.__main__ import read_run
from modernbert_train.distributed.compute import Compute
from modernbert_train.distributed.group import sums_over_ranks, this_rank
from modernbert_train.errors import RunError
from modernbert_train.report.record import Record
from modernbert_train.report.throughput import Meter
from modernbert_train.train import recorder, silent_faults
from modernbert_train.train.recorder import Recorder
from modernbert_train.train.silent_faults import SilentFaults, checksum
from tests.support.gloo import run_ranks
from tests.support.ranks import train_each
from tests.support.tiny_run import TinyRun

pytestmark = [pytest.mark.runs, pytest.mark.timeout(200)]


def slow_run(words: list[str], slow: int, slow_to_read: int = -1) -> str:
    """Return a rank's error stream while one rank takes longer for each microbatch, or for its data."""
    from modernbert_train.data.loader import PackedLoader
    from modernbert_train.train.adapters import ComposerObjective

    silent_faults.STEPS = 8
    batches = PackedLoader.__iter__

    def read(self: PackedLoader) -> Any:
        for batch in batches(self):
            time.sleep(0.2 if this_rank() == slow_to_read else 0.0)
            yield batch

    PackedLoader.__iter__ = read  # type: ignore[method-assign]
    forward = ComposerObjective.forward

    def slowly(self: ComposerObjective, *given: Any, **named: Any) -> Any:
        time.sleep(0.4 if this_rank() == slow else 0.1)  # else a busy machine makes the one or the other slow
        return forward(self, *given, **named)

    ComposerObjective.forward = slowly  # type: ignore[method-assign]
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        train_each([words], False)
    return said.getvalue()


def test_a_timeout_hardly_longer_than_a_step_is_reported_with_the_time_to_set(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that takes a little longer, of a slow disk or a long text, would count as a hang and end the run."""
    monkeypatch.setattr(recorder, "num_ranks", lambda: 2)
    config = read_run(tiny_run("distributed.timeout_seconds=12"))
    lines: list[str] = []
    progress: Any = SimpleNamespace(line=lines.append)
    meter = Meter(config.model, config.total_tokens, Compute(torch.device("cpu"), "fp32"))
    own = Recorder(
        meter,
        config.total_tokens,
        config.distributed.timeout_seconds,
        Record(None, progress),
        progress,
        lambda found: None,
    )
    for seconds in (90.0, 5.9, 7.0, 8.0):  # the first compiles
        own.warn_of_long_step(seconds)
    (line,) = lines
    assert line.startswith("warning: distributed.timeout_seconds=12, and a step has taken 7.0 s: ")
    assert line.endswith("Set it to 180.")


# ten steps, and of each a microbatch for each of two ranks
TEN_STEPS = (
    *("phases.short.tokens=2400", "phases.short.batch_rows=4", "phases.short.batch_warmup=null"),
    *("phases.short.microbatch_tokens=128", "phases.long=null", "data.validation=null"),
)


def test_a_slow_rank_says_so_and_no_other(tiny_run: TinyRun) -> None:
    first, second = run_ranks(slow_run, 2, tiny_run(*TEN_STEPS), 1)
    assert "is slow" not in first
    assert second.count(f"warning: rank 1 on {socket.gethostname()} is slow: ") == 1
    assert "times the median of all ranks" in second


def test_a_rank_that_waits_for_the_data_of_another_is_not_called_slow(tiny_run: TinyRun) -> None:
    """It would be the healthy one, whose GPU somebody then looks at."""
    assert not any("is slow" in said for said in run_ranks(slow_run, 2, tiny_run(*TEN_STEPS), -1, 1))


def parted(flipped_at: int | None, rank: int, bit: int) -> tuple[str, str]:
    """Steps without training; before one of them a bit of a weight flips on a rank. Return error and output."""
    silent_faults.STEPS = 4
    torch.manual_seed(0)
    model, silent = nn.Linear(64, 33), SilentFaults(torch.device("cpu"))
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        for step in range(1, 17):
            if step == flipped_at and this_rank() == rank:
                model.weight.data.view(torch.int32)[5, 7] ^= 1 << bit
            checks, seconds = silent.to_sum(model.parameters(), step)
            sums = sums_over_ranks([torch.zeros((), dtype=torch.float64), *checks], seconds)
            try:
                silent.check_sums(sums[1 : 1 + len(checks)], sums[1 + len(checks) :], step)
            except RunError as error:
                return f"{step}: {error}; {error.at_fault}", said.getvalue()
    return "", said.getvalue()


def test_a_copy_that_has_parted_ends_the_run_and_is_named() -> None:
    """One bit of 2,145 weights, at the next look and on all ranks; equal ones are left alone."""
    assert run_ranks(parted, 3, None, 0, 0) == [("", "")] * 3
    for error, _ in run_ranks(parted, 3, 10, 2, 0):
        assert error.startswith("12: step 12: the copies of the weights differ between ranks")
        assert f": rank 2 on {socket.gethostname()}. They were equal 4 steps before" in error
        assert "checkpoint of step 8 or before" in error
        assert error.endswith(f"; {(2, socket.gethostname())}")  # the same from any rank


def test_copies_that_never_were_equal_are_a_warning() -> None:
    """As on machines of different processors, where nothing is broken."""
    (first, said), *others = run_ranks(parted, 3, 1, 1, 3)
    assert first == "" and said.count("the copies of the weights are not equal") == 1 and "rank 1 on" in said
    assert others == [("", "")] * 2


def test_any_bit_changes_the_checksum() -> None:
    torch.manual_seed(1)
    parameters = [nn.Parameter(torch.randn(300, 70)), nn.Parameter(torch.randn(11))]
    before = float(checksum(parameters))
    assert 0 <= before < 1 << 20 and before == int(before)
    for bit in range(32):
        flip = (1 << bit) - (1 << 32 if bit == 31 else 0)
        parameters[0].data.view(torch.int32)[17, 3] ^= flip
        assert float(checksum(parameters)) != before, bit
        parameters[0].data.view(torch.int32)[17, 3] ^= flip
