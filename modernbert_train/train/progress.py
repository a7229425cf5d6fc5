"""What a person sees while a run trains: one bar per phase on a terminal, a plain line now and then elsewhere.

Numbers are those of metrics.jsonl, smoothed over the last steps; the file has each of them exactly.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from datetime import datetime, timedelta
from typing import Any

from tqdm import tqdm

from modernbert_train.config.schema import RunConfig
from modernbert_train.report.text import duration, percent, rate, short, tokens_text

_SMOOTHING = 0.9  # of the loss shown
_RECENT_STEPS = 20  # over which speed and waiting are averaged
_BAR = "{desc} {percentage:3.0f}% |{bar:16}| {postfix}"


class Progress:
    """Shows steps as they come.

    Args:
        config: the run.
        visible: whether this process shows anything (rank 0 only).
        tokens: global tokens already seen when the process starts.
    """

    def __init__(self, config: RunConfig, *, visible: bool, tokens: int) -> None:
        self._config = config
        self._visible = visible
        self._bars = visible and config.logging.progress_bar and sys.stderr.isatty()
        self._starts = {}
        start = 0
        for name, phase in config.phases.items():
            self._starts[name] = start
            start += phase.tokens
        self._tokens = tokens
        self._phase: str | None = None
        self._bar: tqdm[Any] | None = None
        self._loss: float | None = None
        self._recent: deque[dict[str, Any]] = deque(maxlen=_RECENT_STEPS)
        self._last_line = 0.0

    def step(self, entry: dict[str, Any]) -> None:
        """Show a step, given as its line of metrics.jsonl."""
        if not self._visible:
            return
        if entry["phase"] != self._phase:
            self._begin(entry)
        self._loss = entry["loss"] if self._loss is None else _SMOOTHING * self._loss + (1 - _SMOOTHING) * entry["loss"]
        self._tokens = entry["tokens"]
        self._recent.append(entry)
        if self._bar is not None:
            self._bar.set_postfix_str(self._numbers(entry), refresh=False)
            done = min(entry["tokens"] - self._starts[entry["phase"]], self._bar.total)
            self._bar.update(done - self._bar.n)
        elif time.monotonic() - self._last_line >= self._config.logging.line_seconds:
            self._last_line = time.monotonic()
            self.line(f"{entry['phase']}  step {entry['step']:,}  {self._numbers(entry)}")

    def line(self, text: str) -> None:
        """Print a line without breaking the bar."""
        if self._visible:
            tqdm.write(text, file=sys.stderr)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _begin(self, entry: dict[str, Any]) -> None:
        self.close()
        self._phase, self._loss = entry["phase"], None
        self._recent.clear()
        if self._bars:
            self._bar = tqdm(
                desc=entry["phase"],
                total=self._config.phases[entry["phase"]].tokens,
                initial=max(0, self._tokens - self._starts[entry["phase"]]),
                bar_format=_BAR,
                dynamic_ncols=True,
                mininterval=0.3,
            )

    def _numbers(self, entry: dict[str, Any]) -> str:
        total = self._config.total_tokens
        parts = [
            f"{tokens_text(self._tokens, 4)} of {tokens_text(total)} tokens ({min(1.0, self._tokens / total):.1%})",
            f"loss {self._loss:.3f}",
            f"lr {rate(entry['lr'])}",
            f"grad {short(entry['grad_norm'])}",
            f"{self._mean('tokens_per_second'):,.0f} tok/s",
            f"MFU {self._mean('mfu'):.1%}" if "mfu" in entry else flops_text(self._mean("rank_flops_per_second")),
            f"wait {percent(1)(self._mean('data_wait_share'))}",
            f"{entry['peak_memory_bytes'] / 1e9:.3g} GB",
            ending(entry["seconds_left"], datetime.now()),
        ]
        return "  ".join(parts)

    def _mean(self, key: str) -> float:
        """Of a quantity per second or a share of the time, over the recent steps."""
        seconds = sum(entry["seconds"] for entry in self._recent)
        return float(sum(entry[key] * entry["seconds"] for entry in self._recent)) / seconds


def flops_text(flops_per_second: float) -> str:
    """3.1e11 -> '310 GFLOP/s'."""
    unit, name = next(((u, n) for u, n in ((1e15, "P"), (1e12, "T"), (1e9, "G")) if flops_per_second >= u), (1e6, "M"))
    return f"{flops_per_second / unit:.3g} {name}FLOP/s"


def ending(seconds_left: float, now: datetime) -> str:
    """When a run will be finished: '2 h 10 min left, ends 14:05', with the day if that is another."""
    end = now + timedelta(seconds=seconds_left)
    return f"{duration(seconds_left)} left, ends {end:{'%H:%M' if end.date() == now.date() else '%Y-%m-%d %H:%M'}}"
