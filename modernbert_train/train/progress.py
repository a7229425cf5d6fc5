"""What a person sees while a run trains: one bar per phase on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm

from modernbert_train.config.schema import RunConfig

_SMOOTHING = 0.9  # of the loss shown; the record in metrics.jsonl is exact


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
        self._started = time.monotonic()
        self._first_tokens = tokens
        self._phase: str | None = None
        self._bar: tqdm[Any] | None = None
        self._loss: float | None = None
        self._last_line = 0.0

    def step(self, entry: dict[str, Any]) -> None:
        """Show a step, given as its line of metrics.jsonl."""
        if not self._visible:
            return
        if entry["phase"] != self._phase:
            self._begin(entry)
        self._loss = entry["loss"] if self._loss is None else _SMOOTHING * self._loss + (1 - _SMOOTHING) * entry["loss"]
        self._tokens = entry["tokens"]
        if self._bar is not None:
            self._bar.set_postfix_str(
                f"loss {self._loss:.3f}  lr {entry['lr']:.1e}  {entry['rows']}x{entry['row_tokens']}", refresh=False
            )
            done = min(entry["tokens"] - self._starts[entry["phase"]], self._bar.total)
            self._bar.update(done - self._bar.n)
        elif time.monotonic() - self._last_line >= self._config.logging.line_seconds:
            self._last_line = time.monotonic()
            self.line(self._text(entry))

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
        if self._bars:
            self._bar = tqdm(
                desc=entry["phase"],
                total=self._config.phases[entry["phase"]].tokens,
                initial=max(0, self._tokens - self._starts[entry["phase"]]),
                unit="tok",
                unit_scale=True,
                dynamic_ncols=True,
                mininterval=0.3,
            )

    def _text(self, entry: dict[str, Any]) -> str:
        elapsed = time.monotonic() - self._started
        rate = (self._tokens - self._first_tokens) / max(elapsed, 1e-9)
        left = max(0, self._config.total_tokens - self._tokens) / max(rate, 1e-9)
        return (
            f"{entry['phase']}  step {entry['step']}  {self._tokens:,}/{self._config.total_tokens:,} tokens "
            f"({self._tokens / self._config.total_tokens:.0%})  loss {self._loss:.3f}  lr {entry['lr']:.2e}  "
            f"{entry['tokens_per_second']:,.0f} tok/s  {_duration(left)} left"
        )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"
