"""The corpus, cut into tasks that can be done in any order by anyone, and the folder in which they are done.

How it is cut depends only on the spec and on the names and sizes of the files, never on who does the work; so the
output cannot depend on it either. A task reads spans that follow each other, and the tasks follow each other in the
order of the sources.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from data_prep.read.items import Span
from data_prep.read.lines import can_be_cut
from data_prep.read.sources import file_state, whole_spans
from data_prep.read.tables import parquet_groups
from modernbert_train.config.tools.prepare import DatasetConfig, RowSourceConfig
from modernbert_train.core.files import write_whole
from modernbert_train.errors import DataError

_FEW_TASKS = 64  # a small corpus is cut into so many, so that every core has work ...
_SMALL_TASK_BYTES = 1 << 21  # ... but into none smaller than this
_FILE_BYTES = 1 << 10  # opening a file costs as much as reading so many bytes
TASKS = "tasks.json"


@dataclass(frozen=True)
class Work:
    """The folder of an unfinished dataset: tasks, and their results so far.

    Attributes:
        folder: next to the dataset's.
        sizes: bytes that each task reads, estimated.
    """

    folder: Path
    sizes: list[int]

    @property
    def tasks(self) -> int:
        return len(self.sizes)

    def stage(self, name: str) -> Path:
        """Where datatrove keeps a stage's logs, statistics and marks of completion."""
        return self.folder / "stages" / name

    def tally(self, stage: str, rank: int) -> Path:
        return self.folder / stage / f"{rank:05d}.json"

    def codes(self, rank: int) -> Path:
        """One byte for each item that a task reads: left out, or the split it goes to."""
        return self.folder / "survey" / f"{rank:05d}.codes"

    def shards(self, rank: int) -> Path:
        return self.folder / "tokenise" / f"{rank:05d}"

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer"

    def spans(self, rank: int) -> Iterator[Span]:
        """Yield the spans of a task; each is checked before it is read and after.

        Raises:
            DataError: a file has changed since the tasks were made.
        """
        for content in json.loads(self._part(rank).read_text(encoding="utf-8")):
            span = Span(**content | {"state": content["state"] and tuple(content["state"])})
            _require_unchanged(span)
            yield span
            _require_unchanged(span)

    @property
    def failure_file(self) -> Path:
        """Where a machine writes why it failed, for others that wait for it."""
        return self.folder / "failed"

    def failure(self) -> str | None:
        return self.failure_file.read_text(encoding="utf-8") if self.failure_file.exists() else None

    def _part(self, rank: int) -> Path:
        return self.folder / "parts" / f"{rank:05d}.json"


def make_work(folder: Path, config: DatasetConfig, identity: dict[str, Any]) -> Work:
    """Cut the corpus and write the list of tasks; several machines may do so at once, and write the same.

    Args:
        folder: made here if need be.
        config: the spec.
        identity: fingerprint of the spec and its inputs, see report.fingerprint.

    Raises:
        ConfigError, DataError: a source cannot be listed.
    """
    work = Work(folder, [])
    (folder / "parts").mkdir(parents=True, exist_ok=True)
    for rank, spans in enumerate(cut(config)):
        _write(work._part(rank), [asdict(span) for span in spans])
        work.sizes.append(sum(span.size for span in spans))
    _write(folder / TASKS, {"asked": identity, "sizes": work.sizes})
    return work


def read_work(folder: Path) -> tuple[Work, dict[str, Any]] | None:
    """Return the tasks of a folder and its fingerprint; None if it is missing or was not completed."""
    try:
        content = json.loads((folder / TASKS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return Work(folder, content["sizes"]), content["asked"]


def cut(config: DatasetConfig) -> Iterator[list[Span]]:
    """Yield the spans of each task, in order; there is at least one task."""
    wholes = [span for name, source in config.sources.items() for span in whole_spans(name, source)]
    total = sum(span.size for span in wholes)
    limit = min(config.task_bytes, max(_SMALL_TASK_BYTES, total // _FEW_TASKS))
    task: list[Span] = []
    size = 0
    for whole in wholes:
        for span in _cut_file(whole, config.sources[whole.source], limit):
            cost = span.size + _FILE_BYTES
            if task and size + cost > limit:
                yield task
                task, size = [], 0
            task.append(span)
            size += cost
    yield task


def _cut_file(whole: Span, source: RowSourceConfig, limit: int) -> Iterator[Span]:
    if whole.path is None or whole.size <= limit:
        yield whole
    elif source.kind in ("jsonl", "fasta") and can_be_cut(Path(whole.path), source.encoding):
        parts = -(-whole.size // limit)
        ends = [whole.size * part // parts for part in range(parts + 1)]
        for begin, end in itertools.pairwise(ends):
            yield replace(whole, begin=begin, end=end, size=end - begin)
    elif source.kind == "parquet" and len(groups := parquet_groups(Path(whole.path))) > 1:
        stored = whole.size / max(1, sum(groups))  # bytes in the file for one decompressed
        for index, size in enumerate(groups):
            yield replace(whole, begin=index, end=index + 1, size=int(size * stored))
    else:
        yield whole


def _require_unchanged(span: Span) -> None:
    if span.path is not None and file_state(Path(span.path)) != span.state:
        raise DataError(
            f"{span.path}: not the file it was when this began. Something writes to the sources; let it end and start "
            "again."
        )


def _write(path: Path, content: Any) -> None:
    write_whole(path, json.dumps(content))
