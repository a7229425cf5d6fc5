"""Progress on the screen: one line that is redrawn on a terminal, a line now and then elsewhere.

Both are the same line, what matters most first; a terminal gets as much of it as it is wide. Numbers are those of
metrics.jsonl, smoothed over the last steps; the file has each of them exactly. All goes to standard output, where the
banner is, so that `| tee` keeps it whole.
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

_SMOOTHING = 0.9  # of the loss shown
_RECENT_STEPS = 20  # over which speed and waiting are averaged
_REDRAW_SECONDS = 0.3
_CLEAR = "\r\x1b[K"  # to the start of the line, and nothing on it


class Progress:
    """Shows steps as they come.

    Args:
        config: the run's section logging.
        total_tokens: of the run.
        visible: whether this process shows anything (rank 0 only).

    Attributes:
        loss: of the last steps of the phase, smoothed, for the line that is seen while training; None before the first.
    """

    def __init__(self, config: LoggingConfig, total_tokens: int, *, visible: bool) -> None:
        self._line_seconds, self._total = config.line_seconds, total_tokens
        self._visible = visible
        self._redraws = visible and config.progress_bar and sys.stdout.isatty()
        self.loss: float | None = None
        self._phase: str | None = None
        self._recent: deque[dict[str, Any]] = deque(maxlen=_RECENT_STEPS)
        self._drawn = ""  # what stands on the terminal's last line
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
        """Print a line; the one that is redrawn stays below it."""
        if self._visible:
            self._write(f"{_CLEAR}{text}\n{self._drawn}" if self._drawn else f"{text}\n")

    def close(self) -> None:
        """Leave the last line where it is and go to the next."""
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
        total, speed, left = self._total, self._mean("tokens_per_second"), entry["seconds_left"]
        done = f"{min(1.0, entry['tokens'] / total):.1%}"
        first = [
            (done, done),
            (f"loss {self.loss:.3f}", f"{self.loss:.3f}"),
            (f"{speed:,.0f} tok/s", f"{tokens_text(speed).replace(' ', '')}/s"),
            (f"{duration(left)} left", duration(left).replace(" ", "")),
        ]
        rest = [
            f"ends {ending(left, datetime.now())}",
            entry["phase"],
            f"step {entry['step']:,}",
            f"{tokens_text(entry['tokens'], 4)} of {tokens_text(total)} tokens",
            f"lr {rate(entry['lr'])}",
            f"grad {short(entry['grad_norm'])}",
            f"MFU {self._mean('mfu'):.1%}" if "mfu" in entry else flops_text(self._mean("rank_flops_per_second")),
            f"wait {percent(1)(self._mean('data_wait_share'))}",
            f"{entry['peak_memory_bytes'] / 1e9:.3g} GB",
        ]
        return fitted(first, rest, width)

    def _mean(self, key: str) -> float:
        """Of a quantity per second or a share of the time, over the recent steps."""
        seconds = sum(entry["seconds"] for entry in self._recent)
        return float(sum(entry[key] * entry["seconds"] for entry in self._recent)) / seconds


def fitted(first: Sequence[tuple[str, str]], rest: Sequence[str], width: int | None) -> str:
    """As much of a line as fits, most important first.

    Args:
        first: what must be seen, each in words and, for a narrow terminal, in short.
        rest: what may be left out, from its end.
        width: in characters; None has room for everything.
    """
    line = "  ".join(words for words, _ in first)
    if width is None:
        return "  ".join([line, *rest])
    if len(line) > width:
        return " ".join(brief for _, brief in first)[: max(0, width)]
    for words in rest:
        if len(line) + len(words) + 2 > width:
            break
        line += f"  {words}"
    return line


def flops_text(flops_per_second: float) -> str:
    """3.1e11 -> '310 GFLOP/s'."""
    unit, name = next(((u, n) for u, n in ((1e15, "P"), (1e12, "T"), (1e9, "G")) if flops_per_second >= u), (1e6, "M"))
    return f"{flops_per_second / unit:.3g} {name}FLOP/s"


def ending(seconds_left: float, now: datetime) -> str:
    """When a run will be finished: '14:05', with the day if that is another."""
    end = now + timedelta(seconds=seconds_left)
    return f"{end:{'%H:%M' if end.date() == now.date() else '%Y-%m-%d %H:%M'}}"


def stage(text: str) -> None:
    """Say what comes next; of several ranks only the first speaks."""
    if os.environ.get("RANK", "0") == "0":
        print(f"{text} ...", flush=True)
