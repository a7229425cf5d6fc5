"""Progress lines. If this breaks, a run that goes wrong looks like one that does not."""

from __future__ import annotations

import io
import os
from datetime import datetime
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from modernbert_train.config.load import load_run
from modernbert_train.report import progress
from modernbert_train.report.progress import Progress, ending, fitted
from tests.support.tiny_run import TinyRun


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def entry(step: int, phase: str = "short", **more: Any) -> dict[str, Any]:
    return {
        "step": step, "phase": phase, "tokens": 400 * step, "loss": 5.0, "lr": 8e-4, "grad_norm": 0.71234,
        "tokens_per_second": 400.0, "seconds": 1.0, "rank_flops_per_second": 2.5e12, "data_wait_share": 0.04,
        "peak_memory_bytes": 41_300_000_000, "seconds_left": 7800.0,
    } | more  # fmt: skip


def shown(tiny_run: TinyRun, *overrides: str, visible: bool = True) -> Progress:
    file, *words = tiny_run(*overrides)
    config = load_run([file], words)
    return Progress(config.logging, config.total_tokens, visible=visible)


def test_a_plain_line_says_everything(tiny_run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    """On standard output, like the banner: `train | tee log` keeps both, without control characters."""
    display = shown(tiny_run, "logging.progress_bar=true", "logging.line_seconds=0.001")
    display.step(entry(1, mfu=0.412))
    display.line("validation at 400 tokens")
    display.close()
    said, error = capsys.readouterr()
    line, after = said.splitlines()
    assert line.startswith("6.7%  loss 5.000  400 tok/s  2 h 10 min left  ends ")
    assert line.endswith("  short  step 1  400 of 6 k tokens  lr 8e-4  grad 0.712  MFU 41.2%  wait 4 %  41.3 GB")
    assert after == "validation at 400 tokens" and error == ""
    assert "\r" not in said and "\x1b" not in said  # a log file, not a terminal


def test_speeds_are_means_over_time(
    tiny_run: TinyRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 tokens in 1 s and 1,000 in 9 s are 200 a second, not 555; without a known peak FLOP/s are shown."""
    now = iter([100.0, 200.0, 201.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(now)))
    display = shown(tiny_run)
    display.step(entry(1, tokens_per_second=1000.0, seconds=1.0, rank_flops_per_second=5e12, data_wait_share=0.5))
    slow = {"tokens_per_second": 1000 / 9, "seconds": 9.0, "rank_flops_per_second": 0.0, "data_wait_share": 0.0}
    display.step(entry(2, **slow))
    display.step(entry(3))  # one second later: no line yet
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert "  200 tok/s  " in lines[1] and "  500 GFLOP/s  wait 5 %  " in lines[1]


FIRST = [("24.6%", "24.6%"), ("loss 2.113", "2.113"), ("301,500 tok/s", "302k/s"), ("27 h 49 min left", "27h49min")]
REST = ["ends 2026-05-02 14:05", "stable", "step 1,200", "9.83 G of 40 G tokens", "lr 8e-4", "grad 0.31", "MFU 38.2%",
        "wait 0.2 %", "41.3 GB"]  # fmt: skip
SEEN = {
    20: "24.6% 2.113 302k/s 2",
    40: "24.6% 2.113 302k/s 27h49min",
    60: "24.6%  loss 2.113  301,500 tok/s  27 h 49 min left",
    80: "24.6%  loss 2.113  301,500 tok/s  27 h 49 min left  ends 2026-05-02 14:05",
    100: "24.6%  loss 2.113  301,500 tok/s  27 h 49 min left  ends 2026-05-02 14:05  stable  step 1,200",
    130: "24.6%  loss 2.113  301,500 tok/s  27 h 49 min left  ends 2026-05-02 14:05  stable  step 1,200  "
    "9.83 G of 40 G tokens  lr 8e-4",
    200: "24.6%  loss 2.113  301,500 tok/s  27 h 49 min left  ends 2026-05-02 14:05  stable  step 1,200  "
    "9.83 G of 40 G tokens  lr 8e-4  grad 0.31  MFU 38.2%  wait 0.2 %  41.3 GB",
}


@pytest.mark.parametrize("width", SEEN)
def test_a_narrow_terminal_loses_what_matters_least(width: int) -> None:
    """Progress, loss, speed and time left are visible on any terminal; they matter most."""
    assert fitted(FIRST, REST, width) == SEEN[width]


def test_no_line_is_wider_than_its_terminal_and_none_shows_less_than_a_narrower_one() -> None:
    lines = [fitted(FIRST, REST, width) for width in range(1, 250)]
    assert all(len(line) <= width for width, line in enumerate(lines, 1))
    assert lines[-1] == fitted(FIRST, REST, None)
    long = [line for line in lines if "tok/s" in line]
    assert len(long) > 150 and all(b.startswith(a) for a, b in pairwise(long))


def test_a_terminal_gets_a_line_that_is_redrawn(tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are printed above it, complete; the last state of each phase stays."""
    terminal = Terminal()
    monkeypatch.setattr(progress.sys, "stdout", terminal)
    monkeypatch.setattr(progress.shutil, "get_terminal_size", lambda *_, **__: os.terminal_size((80, 24)))
    now = iter(range(100, 200))
    clock = SimpleNamespace(monotonic=lambda: float(next(now)))  # separate, since other threads read the real one
    monkeypatch.setattr(progress, "time", clock)
    display = shown(tiny_run, "logging.progress_bar=true")
    for step in range(1, 11):
        display.step(entry(step))
    display.line("validation at 4,000 tokens")
    display.step(entry(11, "long"))
    display.close()
    seen = terminal.getvalue().split("\n")
    assert [text.rpartition("\x1b[K")[2].split("  ")[0] for text in seen] == [
        "validation at 4,000 tokens", "66.7%", "73.3%", ""
    ]  # fmt: skip
    drawn = [text for text in terminal.getvalue().replace("\n", "\r\x1b[K").split("\r\x1b[K") if "loss" in text]
    assert len(drawn) == 12 and all(len(text) < 80 and "2 h 10 min left" in text for text in drawn)


def test_another_rank_shows_nothing(tiny_run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    display = shown(tiny_run, visible=False)
    display.step(entry(1))
    display.line("text")
    assert capsys.readouterr() == ("", "")


def test_times_and_rates_in_words() -> None:
    assert ending(7800, datetime(2026, 5, 1, 11, 55)) == "14:05"
    assert ending(86_400, datetime(2026, 5, 1, 11, 55)) == "2026-05-02 11:55"
