"""Profile a few steps: a trace for a browser and a table of ten, from torch.profiler.

Built only if `profile:` is set, so a run without it carries nothing of this. Our own and not Composer's Profiler, which
also records every event of its engine and writes into its own layout of files.
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
_NAME = 64  # characters of an operator's or a kernel's name; those of kernels are whole C++ signatures
Timing = tuple[str, float, int]  # name, microseconds of its own, calls


class Profile:
    """Records some steps of this rank; a failure to write what was found never costs the run.

    A step is recorded from the end of the one before to its own end, the wait for its batch and, where they happen, a
    validation or a checkpoint included.

    Args:
        settings: what to record.
        folder: gets steps-A-B.json.gz, which Perfetto and chrome://tracing open, and steps-A-B.txt.
        device: of this rank.
        progress: shows where they are.
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
        self._steps = 0  # of this process
        self._last_step = 0  # of the run
        self._began = 0.0

    def begin(self) -> None:
        if self._profiler is not None:
            self._profiler.start()

    def after_step(self, number: int) -> None:
        """A step of the run is over."""
        if self._profiler is None:
            return
        self._steps += 1
        self._last_step = number
        self._profiler.step()  # writes, when the last step is recorded
        if self._steps == self._settings.skip:
            self._began = time.perf_counter()
        elif self._steps == self._settings.skip + self._settings.steps:
            self._end()

    def close(self) -> None:
        if self._steps > self._settings.skip:
            self._end()  # the run ended in the middle: what there is is written
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
    """What the host did: operators with the time spent in them and not in others that they call."""
    return [
        (str(each.key), float(each.self_cpu_time_total), int(each.count))
        for each in averages
        if each.device_type.name == "CPU" and not str(each.key).startswith("ProfilerStep")
    ]


def device_rows(averages: Sequence[Any]) -> list[Timing]:
    """What the GPU did: kernels and copies, not the ranges that only name them."""
    return [
        (str(each.key), float(each.self_device_time_total), int(each.count))
        for each in averages
        if each.device_type.name == "CUDA" and not each.is_user_annotation
    ]


def table(title: str, rows: Sequence[Timing], seconds: float, steps: int) -> str:
    """The ten that took most, with their shares of all of them.

    Args:
        title: what is listed.
        rows: everything there is.
        seconds: that the steps took.
        steps: that were recorded.
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
