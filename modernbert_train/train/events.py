"""Fire Composer's events from our loop, for its callbacks and loggers."""

from __future__ import annotations

from typing import Any

from composer import Trainer
from composer.core import Event

from modernbert_train.batch import Batch
from modernbert_train.distributed.heartbeat import post_heartbeat
from modernbert_train.train.silent_faults import SilentFaults


class Events:
    """Fires events after Composer's state has been brought up to date.

    Args:
        trainer: its callbacks and loggers receive the events.
        silent: is notified of forward passes and of the last loss; None if silent faults are not checked.
    """

    def __init__(self, trainer: Trainer, silent: SilentFaults | None) -> None:
        self._trainer, self._state, self._silent = trainer, trainer.state, silent

    def fire(self, event: Event) -> None:
        """Fire an event, and post it as this rank's heartbeat."""
        post_heartbeat(f"{event.value} of step {self._state.timestamp.batch.value}")
        self._trainer.engine.run_event(event)

    def fire_in_microbatch(self, event: str, microbatch: Batch, value: Any, last: bool) -> None:
        """Fire an event of a microbatch; see `gradients`."""
        self._state.batch = microbatch
        if event == "before_forward" and self._silent is not None:
            self._silent.forward()
        elif event == "after_forward":
            self._state.outputs = value
        elif event == "after_loss":
            self._state.loss = value
            if last and self._silent is not None:
                self._silent.last_loss()
        self.fire(Event(event))

    def log_clock(self) -> None:
        """Log the position of the run, by Composer's metric names."""
        now, units = self._state.timestamp, ("batch", "sample", "token")
        self._trainer.logger.log_metrics(
            {f"time/{unit}{within}": getattr(now, f"{unit}{within}").value for unit in units
             for within in ("", "_in_epoch")}
        )  # fmt: skip
