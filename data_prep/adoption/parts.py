"""The parts of a pass over a dataset, done by several processes, and said how far they are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from data_prep.tasks.progress import State, shown
from data_prep.tasks.workers import Workers


def run_parts(job: Any, parts: int, work: Path, number: int) -> None:
    """Do the parts that are not done, in so many processes, and say on stderr how far they are.

    Args:
        job: has `run_task(rank)`, which leaves `<rank>.json` in the folder of the work; can be pickled.
        parts: how many.
        work: that folder.
        number: of processes; one works in this.
    """

    def state() -> State:
        done = sum(1 for _ in work.glob("[0-9]*.json"))
        return done / parts, f"{done:,} of {parts:,} parts"

    ranks = [rank for rank in range(parts) if not (work / f"{rank:05d}.json").exists()]
    if len(ranks) < parts:
        print(f"{parts - len(ranks):,} of {parts:,} parts are done already", file=sys.stderr)
    with shown(state), Workers(number, "give fewer --workers") as workers:
        workers.run(job, ranks)
