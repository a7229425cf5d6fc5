"""Progress of work on many items: a line redrawn on a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
import time

from modernbert_train.core.text import duration

_REDRAW_SECONDS, _LINE_SECONDS = 0.5, 15.0


class Counting:
    """Counts items as they are done, on standard output.

    Args:
        label: name of the work, such as `scifact: documents`.
        total: number of items.
    """

    def __init__(self, label: str, total: int) -> None:
        self._label, self.total, self.done = label, total, 0
        self._redraws, self._began = sys.stdout.isatty(), time.monotonic()
        self._next = self._began

    def skip(self, number: int) -> None:
        """Set the number of items done without printing, for items that were done before."""
        self.done = number

    def add(self, number: int) -> None:
        """Count this many items as done; print now and then, and at the end."""
        self.done += number
        now, ends = time.monotonic(), self.done >= self.total
        if now < self._next and not ends:
            return
        self._next = now + (_REDRAW_SECONDS if self._redraws else _LINE_SECONDS)
        speed = self.done / max(1e-9, now - self._began)
        time_left = "" if ends else f", {duration((self.total - self.done) / speed)} left"
        start, end = ("\r\x1b[K", "\n" if ends else "") if self._redraws else ("", "\n")
        print(f"{start}{self._label} {self.done:,} of {self.total:,}, {speed:,.0f}/s{time_left}", end=end, flush=True)
