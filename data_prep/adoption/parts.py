"""The parts of a pass over a dataset, done by several processes, and said how far they are."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_prep.tasks.workers import Workers

_LINE_SECONDS = 10.0


def run_parts(job: Any, parts: int, work: Path, number: int) -> None:
    """Do the parts that are not done, in so many processes, and say on stderr how far they are.

    Args:
        job: has `run_task(rank)`, which leaves `<rank>.json` in the folder of the work; can be pickled.
        parts: how many.
        work: that folder.
        number: of processes; one works in this.
    """
    ranks = [rank for rank in range(parts) if not (work / f"{rank:05d}.json").exists()]
    if len(ranks) < parts:
        print(f"{parts - len(ranks):,} of {parts:,} parts are done already", file=sys.stderr)
    with _told(work, parts), Workers(number, "give fewer --workers") as pool:
        if min(number, len(ranks)) > 1:
            pool.run(pickle.dumps(job), ranks)
        else:
            for rank in ranks:
                job.run_task(rank)


@contextmanager
def _told(work: Path, parts: int) -> Iterator[None]:
    """Say now and then how many parts are done."""
    over = threading.Event()

    def tell() -> None:
        while not over.wait(_LINE_SECONDS):
            done = sum(1 for _ in work.glob("[0-9]*.json"))
            print(f"{done:,} of {parts:,} parts, {done / parts:.0%}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
