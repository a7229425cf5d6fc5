"""Requests for a checkpoint out of turn: a signal, which also ends the run, or time, if a checkpoint is overdue.

They come to one rank and concern all of them, so they travel with the numbers that are summed over the ranks in each
step; see step_numbers.py. A rank alone need not wait for that.
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

# A scheduler that signals every process of a job, and the launcher that passes the signal on, mean the same request.
ONE_REQUEST_SECONDS = 1.0


@dataclass(frozen=True)
class SaveRequest:
    """Attributes: stop the run after a checkpoint; write one because the last one is too old; the one that was being
    written behind the run has failed."""

    stop: bool = False
    overdue: bool = False
    failed: bool = False


class Requests:
    """Collects the requests of this rank.

    SIGINT, SIGTERM and SIGUSR1 to any rank let all ranks finish the step, save, and end; a second signal ends at once.

    Args:
        interval_seconds: after so long a checkpoint is overdue; None is never.

    Attributes:
        trained: the last step is done, so that nothing is left to be stopped.
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
        """Take over the signals, until `close`."""
        self._listening.enter_context(handled_by(self._on_signal))

    def close(self) -> None:
        """Give the signals back to whoever had them."""
        self._listening.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a data worker that has not yet learnt to leave signals to the run
        if self._signal is not None:
            if time.monotonic() - self._signalled < ONE_REQUEST_SECONDS:
                return
            os._exit(128 + number)  # not sys.exit: a worker or a collective may be what hangs
        self._signal, self._signalled = number, time.monotonic()
        doing = "the run is over and is being closed" if self.trained else "finishing this step, then saving"
        if tells_signals():
            say(f"{signal.Signals(number).name}: {doing}; once more ends at once.")

    def of_this_rank(self) -> SaveRequest:
        overdue = self._interval is not None and time.monotonic() - self._last_saved >= self._interval
        return SaveRequest(self._signal is not None, overdue, self._failed)

    def saved(self) -> None:
        """A checkpoint was taken of the run as it is now."""
        self._last_saved = time.monotonic()

    def save_failed(self) -> None:
        """A checkpoint could not be written; all ranks raise it together."""
        self._failed = True
