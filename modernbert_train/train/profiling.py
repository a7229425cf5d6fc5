"""Profile a few steps with torch.profiler: a trace for a browser, and a table of the ten slowest operators.

Built only if `profile:` is set. Composer's Profiler is not used: it also records every event of its engine and writes
files in another layout.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from modernbert_train.config.schema import ProfileConfig
from modernbert_train.core.files import errors_to
from modernbert_train.report.progress import Progress

TOP = 10
_NAME = 64  # maximum characters of a name; kernel names are whole C++ signatures
Timing = tuple[str, float, int]  # name, microseconds without its callees, calls


class Profile:
    """Records some steps of this rank; a failure to write the result does not end the run.

    A step lasts from the end of the one before to its end, including the wait for its batch and any validation or
    checkpoint.

    Args:
        settings: the run's section `profile`.
        folder: receives steps-A-B.json.gz, for Perfetto or chrome://tracing, and steps-A-B.txt.
        device: this rank's device.
        progress: shows where the files are.
    """

    def __init__(self, settings: ProfileConfig, folder: Path, device: torch.device, progress: Progress) -> None:
        self._settings = settings
        self._folder = folder
        self._progress = progress
        self._on_gpu = device.type == "cuda"
        self._profiler: profile | None = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])],
            schedule=schedule(wait=settings.skip - 1, warmup=1, active=settings.steps, repeat=1),
            on_trace_ready=self._write,
            with_stack=settings.stacks,
            profile_memory=settings.memory,
        )
        self._steps = 0  # in this process
        self._last_step = 0  # in the run
        self._began = 0.0

    def begin(self) -> None:
        if self._profiler is not None:
            self._profiler.start()

    def after_step(self, number: int) -> None:
        """Advance the profiler after a step."""
        if self._profiler is None:
            return
        self._steps += 1
        self._last_step = number
        self._profiler.step()  # writes the files after the last recorded step
        if self._steps == self._settings.skip:
            self._began = time.perf_counter()
        elif self._steps == self._settings.skip + self._settings.steps:
            self._end()

    def close(self) -> None:
        if self._steps > self._settings.skip:
            self._end()  # the run ended early: write the steps recorded so far
        elif self._profiler is not None:
            self._progress.line(
                f"profile: nothing recorded, {self._steps} steps are not more than profile.skip={self._settings.skip}"
            )
            self._end()

    def _end(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _write(self, profiler: profile) -> None:
        recorded = self._steps - self._settings.skip
        if recorded < 1:
            return
        seconds = time.perf_counter() - self._began
        path = self._folder / f"steps-{self._last_step - recorded + 1}-{self._last_step}.json.gz"
        averages = profiler.key_averages()
        tables = [table("operators by their own CPU time", host_rows(averages), seconds, recorded)]
        if self._on_gpu:
            tables.insert(0, table("kernels by GPU time", device_rows(averages), seconds, recorded))
        unwritten = f"warning: the profile could not be written to {self._folder}: "
        with errors_to(self._progress.line, OSError, RuntimeError, before=unwritten):
            self._folder.mkdir(parents=True, exist_ok=True)
            path.with_suffix("").with_suffix(".txt").write_text("\n\n".join(tables) + "\n", encoding="utf-8")
            profiler.export_chrome_trace(str(path))
            self._progress.line(f"{tables[0]}\nprofile: {path}, for ui.perfetto.dev or chrome://tracing")


def host_rows(averages: Sequence[Any]) -> list[Timing]:
    """Return operators with their CPU time, excluding time in operators they call."""
    return [
        (str(each.key), float(each.self_cpu_time_total), int(each.count))
        for each in averages
        if each.device_type.name == "CPU" and not str(each.key).startswith("ProfilerStep")
    ]


def device_rows(averages: Sequence[Any]) -> list[Timing]:
    """Return kernels and copies with their GPU time; ranges that only label them are excluded."""
    return [
        (str(each.key), float(each.self_device_time_total), int(each.count))
        for each in averages
        if each.device_type.name == "CUDA" and not each.is_user_annotation
    ]


def table(title: str, rows: Sequence[Timing], seconds: float, steps: int) -> str:
    """Format the ten slowest rows, with their shares of the total.

    Args:
        title: heading of the table.
        rows: all timings.
        seconds: total duration of the steps.
        steps: number of recorded steps.
    """
    total = math.fsum(row[1] for row in rows)
    lines = [
        f"{title}: {total / 1e6:.3f} s in {steps} steps of {seconds:.3f} s together",
        f"{'ms a step':>10}  {'share':>6}  {'calls a step':>12}  name",
    ]
    for name, microseconds, calls in sorted(rows, key=lambda row: -row[1])[:TOP]:
        share = microseconds / total if total else 0.0
        short = name if len(name) <= _NAME else f"{name[: _NAME - 3]}..."
        lines.append(f"{microseconds / 1e3 / steps:10.2f}  {share:6.1%}  {calls / steps:12.1f}  {short}")
    return "\n".join(lines)
