"""The two readers of a task, as steps of a datatrove pipeline.

`Survey` reads everything once, decides about every document and writes the decisions, one byte each. `Replay` reads
again and looks them up, so that a language model or a quality filter runs only once, for any number of later stages. No
text is stored in between.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from datatrove.data import Document as PipelineDocument
from datatrove.data import DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from data_prep.clean.clean_documents import Kept, SourceTally, Tally, examine, splits_of, values_of
from data_prep.clean.contamination import Evaluations, evaluations_of
from data_prep.clean.filters import make_screen
from data_prep.read.documents import Document, read_span
from data_prep.read.segmented_words import Words
from data_prep.tasks.work import Work
from modernbert_train.config.tools.prepare import DatasetConfig, PrepareConfig
from modernbert_train.data.read.rows import LeftOut
from modernbert_train.errors import DataError

_LEFT_OUT = 255  # code of an item that is not written; others are positions in `splits_of`
# keys of a pipeline document's metadata
SOURCE, SPLIT, RANK, FIELDS, WORDS = "source", "split", "rank", "fields", "words"


Config = TypeVar("Config", bound=DatasetConfig)


class Step(PipelineStep, Generic[Config]):
    """A step of a stage's pipeline, by its name in datatrove's logs.

    Args:
        work: folder through which stages pass their results.
        config: the spec.
        stage: name of the stage, also of its tally.
    """

    def __init__(self, work: Work, config: Config, stage: str) -> None:
        super().__init__()
        self._work = work
        self._config = config
        self._stage = stage

    def _leave(self, tally: Tally, rank: int, started: float) -> None:
        """Write the tally of a task, which started at a time."""
        tally.seconds[self._stage] = time.monotonic() - started
        path = self._work.tally(self._stage, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(tally.to_json()), encoding="utf-8")


class _Reader(Step[PrepareConfig]):
    type = "reader"

    def _items(self, rank: int, tally: Tally | None = None) -> Iterator[tuple[str, Document | LeftOut]]:
        """Yield every item in the spans of a task, with the name of its source; count bytes in a tally."""
        for span in self._work.spans(rank):
            counts = SourceTally() if tally is None else tally.source(span.source)
            counts.input_bytes["all"] += span.size
            for item in read_span(span, self._config.sources[span.source], self._config.max_characters):
                yield span.source, item
                if isinstance(item, LeftOut) and item.rest:
                    counts.input_bytes["lost"] += span.size


class Survey(_Reader):
    """Step that reads a task's part of the corpus, cleans and filters it, and yields the kept documents."""

    name = "survey"

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Yield the kept documents; after the last, write the decisions and the tally."""
        started = time.monotonic()
        screen, evaluations = make_screen(self._config.filters), evaluations_of(self._config)
        tally, codes, splits = Tally(), bytearray(), splits_of(self._config)
        for source, item in self._items(rank, tally):
            counts = tally.source(source)
            counts.read += 1
            result = examine(item, self._config, screen) if isinstance(item, Document) else item
            if evaluations is not None and isinstance(result, Kept):
                result = _uncontaminated(item.id, result, evaluations)
            if isinstance(result, LeftOut):
                tally.leave_out(source, result, self._config.on_error)
                codes.append(_LEFT_OUT)
                continue
            tally.drawn(result.draw)
            counts.altered.update(result.altered)
            counts.documents[result.split] += 1
            counts.text_bytes[result.split] += result.bytes
            tally.count_fields(result.split, result.fields, tokens=0)
            codes.append(splits.index(result.split))
            yield _for_pipeline(source, item.id, result.text, result.split, rank, result.fields)
        self._work.codes(rank).parent.mkdir(parents=True, exist_ok=True)
        self._work.codes(rank).write_bytes(codes)
        self._leave(tally, rank, started)


class Replay(_Reader):
    """Step that yields the documents that `Survey` kept, in the same order."""

    name = "replay"

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Yield the kept documents.

        Raises:
            DataError: the part has changed since the survey.
        """
        screen = make_screen(self._config.filters)
        codes, splits = self._work.codes(rank).read_bytes(), splits_of(self._config)
        read = changed = 0
        for source, item in self._items(rank):
            code = codes[read] if read < len(codes) else _LEFT_OUT
            read += 1
            if code == _LEFT_OUT:
                continue
            if isinstance(item, Document):
                text, fields = screen.filtered(item.id, item.text), values_of(item, self._config)
                yield _for_pipeline(source, item.id, text, splits[code], rank, fields, item.words)
            else:
                changed += 1
        if changed or read != len(codes):
            raise DataError(
                f"task {rank}: {len(codes)} items at the first reading, {read} at another, {changed} of them no longer "
                "documents. Another program writes to the sources; let it finish and start again."
            )


def read_tallies(work: Work, stage: str) -> Tally:
    """Return the summed tally of all tasks of a stage."""
    total = Tally()
    for rank in range(work.tasks):
        total.add(Tally.from_json(json.loads(work.tally(stage, rank).read_text(encoding="utf-8"))))
    return total


def _uncontaminated(id: str, kept: Kept, evaluations: Evaluations) -> Kept | LeftOut:
    """Return a document, or an item to leave out if it shares words with an evaluation set."""
    shared = evaluations.overlap(kept.text)
    if shared is None:
        return kept
    return LeftOut(id, f"contaminated: {shared.name}", f'shares "{shared.words}" with it', damaged=False)


def _for_pipeline(
    source: str,
    id: str,
    text: str,
    split: str,
    rank: int,
    fields: Mapping[str, str | None],
    words: Words | None = None,
) -> PipelineDocument:
    about = {SOURCE: source, SPLIT: split, RANK: rank, FIELDS: fields, WORDS: words}
    return PipelineDocument(text=text, id=id, metadata=about)
