"""Times on a device: marks without overhead while it works, and the spans between them."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch

Mark = tuple[Any, float]  # a CUDA event or seconds of the wall clock, and CPU seconds of this process


def mark(device: torch.device) -> Mark:
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event, time.process_time()
    return time.perf_counter(), time.process_time()


def between(begin: Mark, end: Mark) -> tuple[float, float]:
    """Return wall-clock and CPU milliseconds between two marks that the device has passed."""
    cpu_ms = 1e3 * (end[1] - begin[1])
    if isinstance(begin[0], float):
        return 1e3 * (end[0] - begin[0]), cpu_ms
    return begin[0].elapsed_time(end[0]), cpu_ms


def wait(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


class Stopwatch:
    """Times of the parts of a step, read after all steps, so that measuring never waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Mark]] = []
        self.seconds: dict[str, list[float]] = {}
        self._steps: list[list[tuple[str, Mark]]] = []

    def start(self) -> None:
        self._marks = [("", mark(self._device))]
        self._steps.append(self._marks)

    def mark(self, part: str) -> None:
        """End a range that belongs to `part`."""
        self._marks.append((part, mark(self._device)))

    def add(self, part: str, seconds: float) -> None:
        self.seconds.setdefault(part, []).append(seconds)

    def read(self) -> dict[str, list[float]]:
        """Return seconds of each part in each step; the device must be synchronised."""
        for marks in self._steps:
            step: dict[str, float] = {}
            for (_, begin), (part, end) in pairwise(marks):
                step[part] = step.get(part, 0.0) + between(begin, end)[0] / 1e3
            for part, seconds in step.items():
                self.add(part, seconds)
        return self.seconds
