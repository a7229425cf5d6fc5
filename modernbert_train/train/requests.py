"""Wishes for a checkpoint out of turn: a signal, which also ends the run, or time, if a checkpoint is overdue.

They come to one rank and concern all of them, so they travel with the numbers that the guard sums over the ranks in
each step; see stability.py. A rank alone need not wait for that.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from types import FrameType

from modernbert_train.launched import tells_signals

# A scheduler that signals every process of a job, and the launcher that passes the signal on, mean the same request.
ONE_REQUEST_SECONDS = 1.0


@dataclass(frozen=True)
class Wishes:
    """Attributes: stop the run after a checkpoint; write one because the last one is too old."""

    stop: bool = False
    overdue: bool = False


class Requests:
    """Collects the wishes of this rank, and knows those of all ranks.

    SIGINT, SIGTERM and SIGUSR1 to any rank let all ranks finish the step, save, and end; a second signal ends at once.

    Args:
        interval_seconds: after so long a checkpoint is overdue; None is never.

    Attributes:
        of_all_ranks: as of the last `agree`.
    """

    def __init__(self, interval_seconds: float | None) -> None:
        self._interval = interval_seconds
        self._last_saved = time.monotonic()
        self._signal: int | None = None
        self._signalled = 0.0
        self.of_all_ranks = Wishes()

    def listen(self) -> None:
        """Take over the signals."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            if time.monotonic() - self._signalled < ONE_REQUEST_SECONDS:
                return
            os._exit(128 + number)  # not sys.exit: a worker or a collective may be what hangs
        self._signal, self._signalled = number, time.monotonic()
        if tells_signals():
            name = signal.Signals(number).name
            print(f"{name}: finishing this step, then saving; once more ends at once.", file=sys.stderr)

    def of_this_rank(self) -> Wishes:
        overdue = self._interval is not None and time.monotonic() - self._last_saved >= self._interval
        return Wishes(self._signal is not None, overdue)

    def agree(self, ranks_that_stop: float, ranks_overdue: float) -> None:
        """Take in how many ranks have which wish; one is enough."""
        self.of_all_ranks = Wishes(ranks_that_stop > 0, ranks_overdue > 0)

    def saved(self) -> None:
        """A checkpoint was written."""
        self._last_saved = time.monotonic()
