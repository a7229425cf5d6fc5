"""Progress of tasks, and the time left: one line that changes on a terminal, a new one now and then elsewhere.

Tasks may run in any process on any machine, so each writes how much it has read into a small file, and whoever shows
the progress adds those up. Stages differ in cost, so a byte counts as much as the stage takes for it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_prep.tasks.work import Work

_WRITE_SECONDS = 1.0
_TERMINAL_SECONDS = 1.0
_LINE_SECONDS = 10.0
State = tuple[float, str]  # the share that is done, and what is being done


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
        self._written = time.monotonic()

    def read(self, size: int) -> None:
        """So many bytes of the part have been read by now."""
        if time.monotonic() - self._written > _WRITE_SECONDS:
            self.write(size)

    def write(self, size: int) -> None:
        """As `read`, at once."""
        self._written = time.monotonic()
        self._path.write_text(str(size))


@dataclass(frozen=True)
class Stage:
    """Tasks of one kind, which follow those of the stage before.

    Attributes:
        name: of the stage.
        tasks: it is done in.
        nanoseconds_per_byte: of input, roughly; only the proportions matter.
        steps: of datatrove's pipeline, the same for every task.
    """

    name: str
    tasks: int
    nanoseconds_per_byte: float
    steps: Sequence[Any] = ()


def progress(work: Work, stages: Sequence[Stage]) -> State:
    """The share that is done, and how many tasks of the first unfinished stage are."""
    done, words = 0.0, "all stages done"
    for stage in reversed(stages):
        finished, share = _stage_progress(work, stage)
        done += share * stage.nanoseconds_per_byte
        if finished < stage.tasks:
            words = f"{stage.name} {finished}/{stage.tasks} tasks"
    return done / sum(stage.nanoseconds_per_byte for stage in stages), words


def _stage_progress(work: Work, stage: Stage) -> tuple[int, float]:
    """Tasks that are finished, and the share of the stage that is done."""
    finished = {int(path.name) for path in (work.stage(stage.name) / "completions").glob("[0-9]*")}
    if len(finished) == stage.tasks:
        return stage.tasks, 1.0
    sizes = dict(enumerate(work.sizes))
    read = 0
    if stage.tasks == work.tasks:  # which read a part each
        read = sum(sizes.pop(rank) for rank in finished)
    for path in _file(work.folder, stage.name, 0).parent.glob("[0-9]*"):
        read += min(int(path.read_text() or 0), sizes.get(int(path.name), 0))
    return len(finished), read / max(1, sum(work.sizes))


@contextmanager
def shown(state: Callable[[], State]) -> Iterator[None]:
    """Show on stderr how much is done while the block runs."""
    over = threading.Event()
    thread = threading.Thread(target=_show, args=(state, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _show(state: Callable[[], State], over: threading.Event) -> None:
    on_terminal = sys.stderr.isatty()
    started, (first, _) = time.monotonic(), state()
    while not over.wait(_TERMINAL_SECONDS if on_terminal else _LINE_SECONDS):
        try:
            done, words = state()
        except OSError:  # another machine has finished and put the work away
            continue
        gone = time.monotonic() - started
        left = tqdm.format_interval(gone * (1 - done) / (done - first)) if done > first else "?"
        line = f"{words}, {done:.0%} of all, {tqdm.format_interval(gone)} gone, {left} left"
        print(f"\r\x1b[K{line}" if on_terminal else line, end="" if on_terminal else "\n", file=sys.stderr, flush=True)
    if on_terminal:
        print(file=sys.stderr)


def _file(folder: Path, stage: str, rank: int) -> Path:
    return folder / "progress" / stage / f"{rank:05d}"
