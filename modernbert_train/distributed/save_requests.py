"""Requests for an extra checkpoint: by a signal, which also ends the run, or by time, if a checkpoint is overdue.

They arrive at one rank and concern all, so they travel with the numbers that are summed over the ranks in each step;
see step_numbers.py. A single rank need not wait for that.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType

from modernbert_train.distributed.launched import tells_signals
from modernbert_train.distributed.stop_signals import handled_by, say

# A scheduler that signals every process of a job and a launcher that forwards the signal mean the same request.
ONE_REQUEST_SECONDS = 1.0


@dataclass(frozen=True)
class SaveRequest:
    """Requests of a rank, or of all: stop the run after a checkpoint; write one, because the last one is too old; raise
    the error of the background write, which has failed."""

    stop: bool = False
    overdue: bool = False
    failed: bool = False


class Requests:
    """Collects the requests of this rank.

    SIGINT, SIGTERM and SIGUSR1 to any rank let all ranks finish the step, save, and end; a second signal ends at once.

    Args:
        interval_seconds: a checkpoint older than this is overdue; None is never.

    Attributes:
        trained: True after the last step.
    """

    def __init__(self, interval_seconds: float | None) -> None:
        self._interval = interval_seconds
        self._last_saved = time.monotonic()
        self._failed = False
        self._signal: int | None = None
        self._signalled = 0.0
        self._process = os.getpid()
        self._listening = ExitStack()
        self.trained = False

    def listen(self) -> None:
        """Handle the signals from now on, until `close`."""
        self._listening.enter_context(handled_by(self._on_signal))

    def close(self) -> None:
        """Restore the previous signal handlers."""
        self._listening.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # in a data worker that does not yet ignore signals
        if self._signal is not None:
            if time.monotonic() - self._signalled < ONE_REQUEST_SECONDS:
                return
            os._exit(128 + number)  # not sys.exit: a worker or a collective may be hanging
        self._signal, self._signalled = number, time.monotonic()
        doing = "the run is over and is being closed" if self.trained else "finishing this step, then saving"
        if tells_signals():
            say(f"{signal.Signals(number).name}: {doing}; once more ends at once.")

    def of_this_rank(self) -> SaveRequest:
        overdue = self._interval is not None and time.monotonic() - self._last_saved >= self._interval
        return SaveRequest(self._signal is not None, overdue, self._failed)

    def saved(self) -> None:
        """Note that a checkpoint of the current state was taken."""
        self._last_saved = time.monotonic()

    def save_failed(self) -> None:
        """Note that a checkpoint could not be written; all ranks raise it together."""
        self._failed = True
