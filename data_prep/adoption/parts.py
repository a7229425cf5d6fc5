"""A pass over a dataset of others in parts that any process may do, and what both forms of it share.

What a part leaves is complete when its JSON file is there, and does not depend on who made it, so that after a kill the
parts that are missing are all that is done again.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from data_prep.adoption.findings import Counting, Findings
from data_prep.adoption.tokenizer_fit import EachShard, require_fit, take_sample
from data_prep.tasks.progress import State, shown
from data_prep.tasks.workers import Workers
from modernbert_train.core.files import write_whole
from modernbert_train.errors import DataError

_WORKER_BYTES = 1 << 27  # a process takes seconds to import what it needs


@dataclass(frozen=True)
class Request:
    """The arguments of data_prep/adopt.py's `adopt`."""

    source: str
    tokenizer: str
    out: str | None
    column: str | None
    dtype: str | None
    workers: int | None
    overwrite: bool
    anyway: bool


@dataclass(frozen=True)
class Pass:
    """A pass over a dataset; pickled and sent to whoever does a part.

    Attributes:
        work: folder in which the parts leave what they make.
        column: that holds the ids.
        vocab_size: one more than the largest id allowed.
        fit: of the tokenizer to documents of each part.
    """

    work: Path
    column: str
    vocab_size: int
    fit: EachShard

    def run_task(self, rank: int) -> None:
        """Do one part.

        Raises:
            DataError: a file is missing, damaged, or holds something else than ids of this vocabulary.
        """
        counting = Counting(self.fit.special.keys(), self.vocab_size)
        left = self.do(rank, counting)
        write_whole(self.file(rank, "json"), json.dumps({"findings": counting.findings.to_json(), **left}))

    def do(self, rank: int, counting: Counting) -> dict[str, Any]:
        """Count all documents of a part; returns what else stands in its JSON file."""
        raise NotImplementedError

    def file(self, rank: int, end: str) -> Path:
        return self.work / f"{rank:05d}.{end}"

    def left(self, rank: int) -> dict[str, Any]:
        """What stands in the JSON file of a part."""
        content: dict[str, Any] = json.loads(self.file(rank, "json").read_text(encoding="utf-8"))
        return content

    def run(
        self, request: Request, firsts: Iterable[tuple[str, NDArray[Any] | None]], parts: int, size: int
    ) -> tuple[Findings, dict[str, Any]]:
        """Do the parts that are not done, and say on stderr how far they are.

        Args:
            request: what is asked for.
            firsts: places, for messages, and ids of a few documents that are compared with the tokenizer before.
            parts: how many.
            size: of all, in bytes.

        Returns:
            What was found in all of them, and facts for the report.

        Raises:
            DataError: see `run_task`; or there are no tokens.
            RunError: a process died.
        """
        documents = [(place, ids) for place, ids in firsts if ids is not None]
        sample = take_sample(documents, request.tokenizer, self.fit.special)
        require_fit(sample, request.source, request.tokenizer, request.anyway)

        def state() -> State:
            done = sum(1 for _ in self.work.glob("[0-9]*.json"))
            return done / parts, f"{done:,} of {parts:,} parts"

        ranks = [rank for rank in range(parts) if not self.file(rank, "json").exists()]
        if len(ranks) < parts:
            print(f"{parts - len(ranks):,} of {parts:,} parts are done already", file=sys.stderr)
        number = request.workers or min(len(os.sched_getaffinity(0)), 1 + size // _WORKER_BYTES)
        with shown(state), Workers(number, "give fewer --workers") as workers:
            workers.run(self, ranks)
        found = Findings()
        for rank in range(parts):
            found.add(Findings.from_json(self.left(rank)["findings"]))
        if not found.tokens:
            raise DataError(f"{request.source}: holds no tokens.")
        return found, {"tokenizer": request.tokenizer, **sample.to_json(), "findings": found.to_json()}
