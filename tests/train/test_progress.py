"""What a person sees; if this breaks, a run that goes wrong looks as one that does not."""

from __future__ import annotations

import io
from datetime import datetime
from typing import Any

import pytest

from modernbert_train.config.load import load_run
from modernbert_train.train import progress
from modernbert_train.train.progress import Progress, ending, flops_text
from tests.conftest import TinyRun


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def entry(step: int, phase: str = "short", **more: Any) -> dict[str, Any]:
    return {
        "step": step, "phase": phase, "tokens": 400 * step, "loss": 5.0, "lr": 8e-4, "grad_norm": 0.71234,
        "tokens_per_second": 400.0, "seconds": 1.0, "rank_flops_per_second": 2.5e12, "data_wait_share": 0.04,
        "peak_memory_bytes": 41_300_000_000, "seconds_left": 7800.0,
    } | more  # fmt: skip


def shown(tiny_run: TinyRun, *overrides: str) -> Progress:
    file, *words = tiny_run(*overrides)
    return Progress(load_run([file], words), visible=True, tokens=0)


def test_a_plain_line_says_everything(tiny_run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    display = shown(tiny_run, "logging.progress_bar=true", "logging.line_seconds=0.001")
    display.step(entry(1, mfu=0.412))
    line = capsys.readouterr().err
    told = (
        "short  step 1  400 of 6 k tokens (6.7%)  loss 5.000  lr 8e-4  grad 0.712  400 tok/s  MFU 41.2%  wait 4 %  "
        "41.3 GB  2 h 10 min left, ends "
    )
    assert line.startswith(told)
    assert line.count("\n") == 1 and "\r" not in line  # a log file, not a terminal


def test_speeds_are_means_over_time(
    tiny_run: TinyRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 tokens in 1 s and 1,000 in 9 s are 200 a second, not 555; where no peak is known, FLOP/s are shown."""
    now = iter([100.0, 100.0, 200.0, 200.0, 201.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    display = shown(tiny_run)
    display.step(entry(1, tokens_per_second=1000.0, seconds=1.0, rank_flops_per_second=5e12, data_wait_share=0.5))
    slow = {"tokens_per_second": 1000 / 9, "seconds": 9.0, "rank_flops_per_second": 0.0, "data_wait_share": 0.0}
    display.step(entry(2, **slow))
    display.step(entry(3))  # one second later: no line yet
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "  200 tok/s  500 GFLOP/s  wait 5 %  " in lines[1]


def test_a_terminal_gets_a_bar_for_each_phase(tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(progress.sys, "stderr", terminal)
    display = shown(tiny_run, "logging.progress_bar=true")
    for step in range(1, 11):
        display.step(entry(step))
    display.line("validation at 4,000 tokens")
    display.step(entry(11, "long"))
    display.close()
    text = terminal.getvalue()
    assert "short 100% |" in text and "long  20% |" in text
    assert "grad 0.712" in text and "2.5 TFLOP/s" in text and "left, ends" in text
    assert "validation at 4,000 tokens\n" in text


def test_another_rank_shows_nothing(tiny_run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    file, *_ = tiny_run()
    display = Progress(load_run([file]), visible=False, tokens=0)
    display.step(entry(1))
    display.line("text")
    assert capsys.readouterr().err == ""


def test_times_and_rates_in_words() -> None:
    assert ending(7800, datetime(2026, 5, 1, 11, 55)) == "2 h 10 min left, ends 14:05"
    assert ending(86_400, datetime(2026, 5, 1, 11, 55)) == "24 h left, ends 2026-05-02 11:55"
    assert [flops_text(f) for f in (3.1e5, 3.1e11, 4.07e14, 1.2e15)] == [
        "0.31 MFLOP/s", "310 GFLOP/s", "407 TFLOP/s", "1.2 PFLOP/s",
    ]  # fmt: skip
