"""Progress of all tasks, and the time left: one bar on a terminal, a plain line now and then elsewhere.

Tasks may run in any process on any machine, so each writes how much it has read into a small file, and whoever shows
the progress adds those up. Stages differ in cost, so a byte counts as much as the stage takes for it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.tasks.work import Work

_WRITE_SECONDS = 1.0
_BAR_SECONDS = 1.0
_LINE_SECONDS = 10.0


class TaskProgress:
    """Tells how much of a task's part has been read.

    Args:
        folder: of the work.
        stage: its name.
        rank: number of the part.
    """

    def __init__(self, folder: Path, stage: str, rank: int) -> None:
        self._path = _file(folder, stage, rank)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._finished = 0  # bytes of spans that are read
        self._span = 0  # characters read of the span under way
        self._written = time.monotonic()

    def read(self, characters: int, span_bytes: int) -> None:
        """A document has been read out of a span of so many bytes."""
        self._span = min(self._span + characters, span_bytes)
        if time.monotonic() - self._written > _WRITE_SECONDS:
            self._write()

    def finish_span(self, span_bytes: int) -> None:
        self._finished, self._span = self._finished + span_bytes, 0

    def close(self) -> None:
        self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        self._path.write_text(str(self._finished + self._span))


@dataclass(frozen=True)
class StageCost:
    """What a stage adds to the whole.

    Attributes:
        name: of the stage.
        tasks: it is done in.
        nanoseconds_per_byte: of input, roughly; only the proportions matter.
    """

    name: str
    tasks: int
    nanoseconds_per_byte: float


@contextmanager
def shown(work: Work, stages: list[StageCost]) -> Iterator[None]:
    """Show the progress on stderr while the block runs."""
    stop = threading.Event()
    thread = threading.Thread(target=_show, args=(work, stages, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def progress(work: Work, stages: list[StageCost]) -> tuple[float, str, int]:
    """The share that is done, the name of the first unfinished stage, and how many of its tasks are done."""
    total = sum(stage.nanoseconds_per_byte for stage in stages)
    done, current = 0.0, None
    for stage in stages:
        finished, share = _stage_progress(work, stage)
        done += share * stage.nanoseconds_per_byte
        if finished < stage.tasks and current is None:
            current = (stage.name, finished)
    name, finished = current or (stages[-1].name, stages[-1].tasks)
    return done / total, name, finished


def _stage_progress(work: Work, stage: StageCost) -> tuple[int, float]:
    """Tasks that are finished, and the share of the stage that is done."""
    finished = {int(path.name) for path in (work.stage(stage.name) / "completions").glob("[0-9]*")}
    if len(finished) == stage.tasks:
        return stage.tasks, 1.0
    by_parts = stage.tasks == work.tasks
    read = sum(work.sizes[rank] for rank in finished) if by_parts else 0
    for path in _file(work.folder, stage.name, 0).parent.glob("[0-9]*"):
        if not (by_parts and int(path.name) in finished):
            read += min(int(path.read_text() or 0), work.sizes[int(path.name)])
    return len(finished), read / max(1, sum(work.sizes))


def _show(work: Work, stages: list[StageCost], stop: threading.Event) -> None:
    from tqdm import tqdm

    on_terminal = sys.stderr.isatty()
    tasks = {stage.name: stage.tasks for stage in stages}
    started = time.monotonic()
    first, _, _ = progress(work, stages)
    bar: tqdm[Any] | None = None
    if on_terminal:
        layout = "{desc} {percentage:3.0f}% |{bar}| {elapsed} gone, {remaining} left"
        bar = tqdm(total=1.0, initial=first, bar_format=layout, smoothing=0, dynamic_ncols=True)
    while not stop.wait(_BAR_SECONDS if on_terminal else _LINE_SECONDS):
        try:
            done, name, finished = progress(work, stages)
        except OSError:  # another machine has finished and put the work away
            continue
        words = f"{name} {finished}/{tasks[name]}"
        if bar is not None:
            bar.set_description_str(words, refresh=False)
            bar.update(done - bar.n)
            continue
        gone = time.monotonic() - started
        left = _duration(gone * (1 - done) / (done - first)) if done > first else "?"
        print(f"{words} tasks, {done:.0%} of all, {_duration(gone)} gone, {left} left", file=sys.stderr, flush=True)
    if bar is not None:
        bar.close()


def _file(folder: Path, stage: str, rank: int) -> Path:
    return folder / "progress" / stage / f"{rank:05d}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"
