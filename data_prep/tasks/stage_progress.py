"""Progress of a stage for its bar: the number of documents of each task, in one file.

Each process writes its own numbers, on any machine; the bar adds them up.
"""

from __future__ import annotations

import os
import time

import numpy as np
from datatrove.data import DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from data_prep.tasks.work import Work

_WRITE_SECONDS = 0.5
_NUMBER = np.dtype("<i8")


class Progress:
    """The number of documents that a stage has processed.

    Args:
        work: the folder.
        stage: name of the stage.
    """

    def __init__(self, work: Work, stage: str) -> None:
        self._path = work.folder / "progress" / stage

    def count(self) -> int:
        """Return the number of documents so far, over all tasks."""
        return int(np.fromfile(self._path, _NUMBER).sum()) if self._path.exists() else 0

    def write(self, rank: int, documents: int) -> None:
        """Store the number of documents of a task."""
        self._path.parent.mkdir(exist_ok=True)
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            os.pwrite(file, np.array(documents, _NUMBER).tobytes(), rank * _NUMBER.itemsize)
        finally:
            os.close(file)


class Counted(PipelineStep):
    """Step that passes documents on and counts them.

    Args:
        progress: where the count is stored.
    """

    type = "stats"
    name = "counted"

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Yield each document."""
        number, due = 0, 0.0
        for number, document in enumerate(data or (), 1):
            if (now := time.monotonic()) >= due:
                self._progress.write(rank, number)
                due = now + _WRITE_SECONDS
            yield document
        self._progress.write(rank, number)
