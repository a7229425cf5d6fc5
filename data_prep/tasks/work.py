"""The corpus, cut into tasks that any process can do in any order, and their folder.

The cuts depend only on the spec and on the names and sizes of the files, never on the machines; so the output cannot
depend on them either. A task reads consecutive spans, and the tasks follow the order of the sources.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from modernbert_train.config.tools.prepare import DatasetConfig, RowSourceConfig
from modernbert_train.core.files import write_whole
from modernbert_train.data.read.find_files import file_state
from modernbert_train.data.read.jsonl import can_be_cut
from modernbert_train.data.read.parquet import parquet_groups
from modernbert_train.data.read.rows import Span
from modernbert_train.data.read.sources import whole_spans
from modernbert_train.errors import DataError

_FEW_TASKS = 64  # a small corpus is cut into this many, so that every core has work ...
_SMALL_TASK_BYTES = 1 << 21  # ... but none smaller than this
_FILE_BYTES = 1 << 10  # opening a file costs as much as reading this many bytes
TASKS = "tasks.json"


@dataclass(frozen=True)
class Work:
    """The folder of an unfinished dataset: its tasks and their results.

    Attributes:
        folder: in the same folder as the dataset.
        sizes: bytes that each task reads, estimated.
    """

    folder: Path
    sizes: list[int]

    @property
    def tasks(self) -> int:
        return len(self.sizes)

    def stage(self, name: str) -> Path:
        """Return datatrove's folder for a stage's logs, statistics and marks of completion."""
        return self.folder / "stages" / name

    def tally(self, stage: str, rank: int) -> Path:
        return self.folder / stage / f"{rank:05d}.json"

    def codes(self, rank: int) -> Path:
        """Return the file with one byte for each item of a task: dropped, or its split."""
        return self.folder / "survey" / f"{rank:05d}.codes"

    def shards(self, rank: int) -> Path:
        return self.folder / "tokenise" / f"{rank:05d}"

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer"

    def spans(self, rank: int) -> Iterator[Span]:
        """Yield the spans of a task; each file is checked before and after reading.

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
        """File in which a machine writes why it failed, for machines that wait for it."""
        return self.folder / "failed"

    def failure(self) -> str | None:
        return self.failure_file.read_text(encoding="utf-8") if self.failure_file.exists() else None

    def _part(self, rank: int) -> Path:
        return self.folder / "parts" / f"{rank:05d}.json"


def make_work(folder: Path, config: DatasetConfig, identity: dict[str, Any]) -> Work:
    """Cut the corpus and write the list of tasks; several machines may do so at the same time, with equal results.

    Args:
        folder: created if necessary.
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
    """Return the tasks of a folder and their fingerprint; None without tasks, or if creating them was interrupted."""
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
    for file in wholes:
        for span in _cut_file(file, config.sources[file.source], limit):
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
        num_parts = -(-whole.size // limit)
        ends = [whole.size * part // num_parts for part in range(num_parts + 1)]
        for begin, end in itertools.pairwise(ends):
            yield replace(whole, begin=begin, end=end, size=end - begin)
    elif source.kind == "parquet" and len(groups := parquet_groups(Path(whole.path))) > 1:
        stored = whole.size / max(1, sum(groups))  # bytes in the file per decompressed byte
        for index, size in enumerate(groups):
            yield replace(whole, begin=index, end=index + 1, size=int(size * stored))
    else:
        yield whole


def _require_unchanged(span: Span) -> None:
    if span.path is not None and file_state(Path(span.path)) != span.state:
        raise DataError(
            f"{span.path}: has changed since this began. Another program writes to the sources; let it finish and "
            "start again."
        )


def _write(path: Path, content: Any) -> None:
    write_whole(path, json.dumps(content))
