"""Write a run's record: each line to metrics.jsonl, and a step's also to the progress display and the loggers.

The line of a step waits for one number, the norm of its update, which is copied from the device while the next step
runs. Lines that must follow it in the record call `flush` first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from modernbert_train.checkpoints.run_folder import RunFolder
from modernbert_train.report.progress import Progress
from modernbert_train.report.throughput import scalars


class Reading:
    """A scalar that is copied to the host asynchronously, after all work already queued on the device.

    Args:
        number: one element, on any device; it may change afterwards.
    """

    def __init__(self, number: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        number = number.detach()
        self._number = torch.empty((), dtype=number.dtype, pin_memory=number.is_cuda).copy_(number, non_blocking=True)
        if number.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def is_here(self) -> bool:
        return self._copied is None or self._copied.query()

    def value(self) -> float:
        """Return the number; waits for its copy only, not for work queued later."""
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._number)


class Record:
    """Writer of lines in the order of their events.

    Args:
        folder: of the run; None on ranks that do not write.
        progress: shows steps.
    """

    def __init__(self, folder: RunFolder | None, progress: Progress) -> None:
        self._folder = folder
        self._progress = progress
        self._step: tuple[dict[str, Any], Reading | None, Callable[[dict[str, Any]], None]] | None = None

    def step(self, entry: dict[str, Any], update_norm: Reading | None, log: Callable[[dict[str, Any]], None]) -> None:
        """Accept the line of a step; it is written now if its update norm has arrived, else with the next `flush`.

        Args:
            entry: the line, without its update_norm.
            update_norm: None if the optimizer does not compute it.
            log: sends numbers to the loggers.
        """
        self._step = (entry, update_norm, log)
        if update_norm is None or update_norm.is_here():
            self.flush()

    def flush(self) -> None:
        """Write the line of the last step if it is not written yet."""
        if self._step is None:
            return
        (entry, update_norm, log), self._step = self._step, None
        if update_norm is not None:
            entry["update_norm"] = update_norm.value()
        if self._folder is not None:
            self._folder.record(entry)
        self._progress.step(entry)
        unlogged = ("kind", "step", "phase")
        log({f"train/{key}": value for key, value in scalars(entry) if key not in unlogged and value is not None})

    def write(self, entry: dict[str, Any]) -> None:
        """Write another line after the line of the last step."""
        self.flush()
        if self._folder is not None:
            self._folder.record(entry)

    def samples(self, entry: dict[str, Any]) -> None:
        """Write the model's predictions for sample texts to samples.jsonl."""
        if self._folder is not None:
            self._folder.record_samples(entry)
