"""Show progress on the screen: one line redrawn on a terminal, a line now and then elsewhere.

Both are the same line, most important figures first, cut to the width of the terminal. It shows the numbers of
metrics.jsonl, smoothed over the last steps; the file has the exact ones. Everything is written to standard output,
like the banner, so `| tee` keeps both.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from modernbert_train.config.schema import LoggingConfig
from modernbert_train.core.text import duration, percent, rate, short, tokens_text

_SMOOTHING = 0.9  # decay of the moving average of the displayed loss
_RECENT_STEPS = 20  # for the means of speed and waiting
_REDRAW_SECONDS = 0.3
_CLEAR = "\r\x1b[K"  # clears the line


class Progress:
    """Shows steps as they come.

    Args:
        config: the run's section logging.
        total_tokens: of the run.
        visible: True if this process shows anything (rank 0 only).

    Attributes:
        loss: smoothed over the last steps of the phase, for display only; None before the first step.
    """

    def __init__(self, config: LoggingConfig, total_tokens: int, *, visible: bool) -> None:
        self._line_seconds, self._total = config.line_seconds, total_tokens
        self._visible = visible
        self._redraws = visible and config.progress_bar and sys.stdout.isatty()
        self.loss: float | None = None
        self._phase: str | None = None
        self._recent: deque[dict[str, Any]] = deque(maxlen=_RECENT_STEPS)
        self._drawn = ""  # text on the terminal's last line
        self._last_line: float | None = None

    def step(self, entry: dict[str, Any]) -> None:
        """Show a step, given as its line of metrics.jsonl."""
        if not self._visible:
            return
        if entry["phase"] != self._phase:
            self._begin(entry["phase"])
        self.loss = entry["loss"] if self.loss is None else _SMOOTHING * self.loss + (1 - _SMOOTHING) * entry["loss"]
        self._recent.append(entry)
        now = time.monotonic()
        every = _REDRAW_SECONDS if self._redraws else self._line_seconds
        if self._last_line is not None and now - self._last_line < every:
            return
        self._last_line = now
        if self._redraws:
            self._drawn = self._text(entry, shutil.get_terminal_size().columns - 1)
            self._write(f"{_CLEAR}{self._drawn}")
        else:
            self._write(f"{self._text(entry, None)}\n")

    def line(self, text: str) -> None:
        """Print a line above the progress line."""
        if self._visible:
            self._write(f"{_CLEAR}{text}\n{self._drawn}" if self._drawn else f"{text}\n")

    def close(self) -> None:
        """End the progress line, which stays on the screen."""
        if self._drawn:
            self._write("\n")
            self._drawn = ""

    def _begin(self, phase: str) -> None:
        self.close()
        self._phase, self.loss, self._last_line = phase, None, None
        self._recent.clear()

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def _text(self, entry: dict[str, Any], width: int | None) -> str:
        total, speed, seconds_left = self._total, self._mean("tokens_per_second"), entry["seconds_left"]
        done = f"{min(1.0, entry['tokens'] / total):.1%}"
        first = [
            (done, done),
            (f"loss {self.loss:.3f}", f"{self.loss:.3f}"),
            (f"{speed:,.0f} tok/s", f"{tokens_text(speed).replace(' ', '')}/s"),
            (f"{duration(seconds_left)} left", duration(seconds_left).replace(" ", "")),
        ]
        optional = [
            f"ends {ending(seconds_left, datetime.now())}",
            entry["phase"],
            f"step {entry['step']:,}",
            f"{tokens_text(entry['tokens'], 4)} of {tokens_text(total)} tokens",
            f"lr {rate(entry['lr'])}",
            f"grad {short(entry['grad_norm'])}",
            f"MFU {self._mean('mfu'):.1%}"
            if "mfu" in entry
            else f"{tokens_text(self._mean('rank_flops_per_second'))}FLOP/s",
            f"wait {percent(1)(self._mean('data_wait_share'))}",
            f"{entry['peak_memory_bytes'] / 1e9:.3g} GB",
        ]
        return fitted(first, optional, width)

    def _mean(self, key: str) -> float:
        """Return the mean, weighted by time, of a rate or a share of the time over the recent steps."""
        seconds = sum(entry["seconds"] for entry in self._recent)
        return float(sum(entry[key] * entry["seconds"] for entry in self._recent)) / seconds


def fitted(first: Sequence[tuple[str, str]], optional: Sequence[str], width: int | None) -> str:
    """Return as much of a line as fits.

    Args:
        first: items that must be visible, each in words and, for a narrow terminal, in short form.
        optional: the last ones are dropped first.
        width: in characters; None is unlimited.
    """
    line = "  ".join(words for words, _ in first)
    if width is None:
        return "  ".join([line, *optional])
    if len(line) > width:
        return " ".join(brief for _, brief in first)[: max(0, width)]
    for words in optional:
        if len(line) + len(words) + 2 > width:
            break
        line += f"  {words}"
    return line


def ending(seconds_left: float, now: datetime) -> str:
    """Return when a run will be finished: '14:05', with the date if it is another day."""
    end = now + timedelta(seconds=seconds_left)
    return f"{end:{'%H:%M' if end.date() == now.date() else '%Y-%m-%d %H:%M'}}"


def stage(text: str) -> None:
    """Print the next stage of a start, on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print(f"{text} ...", flush=True)
