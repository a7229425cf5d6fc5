"""Exact and near duplicates, found by datatrove's steps.

Both work on disk: a task writes one signature for each document, a second stage merges the sorted signatures of all
tasks and lists the documents to drop, and later stages skip these. Of equal texts the first is kept, in the order of
the sources. Of near duplicates one is kept, the same in every run.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup import exact_dedup, minhash
from datatrove.pipeline.dedup.exact_dedup import (
    ExactDedupConfig,
    ExactDedupFilter,
    ExactDedupSignature,
    ExactFindDedups,
)
from datatrove.pipeline.dedup.minhash import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from numpy.typing import NDArray
from tqdm import tqdm

from data_prep.clean.clean_documents import Tally
from data_prep.clean.few_files import FewFiles, records_at_once
from data_prep.clean.word_filters import PlainWords
from data_prep.read.reader_steps import RANK, SOURCE
from data_prep.tasks.work import Work
from modernbert_train.config.tools.prepare import NearDuplicatesConfig, PrepareConfig
from modernbert_train.data.read.rows import LeftOut

exact_dedup.tqdm = minhash.tqdm = partial(tqdm, disable=True)  # else every task shows a bar

DUPLICATE, NEAR_DUPLICATE = "duplicate", "near_duplicate"
_DETAILS = {
    DUPLICATE: "same text as an earlier document",
    NEAR_DUPLICATE: "much the same text as another document",
}
_TASKS_PER_FINDER = 16  # one process compares the signatures of this many tasks, and at most ...
_MOST_FINDERS = 64
# of a stored signature (hash, priority, number), of its hash, of its number
_EXACT_BYTES, _HASH_BYTES, _NUMBER_BYTES = 14, 8, 4
_PAIRS = 1024  # pairs per read of a file
_HIGHEST_PRIORITY = 65535
_SHINGLES = 1 << 13  # hashed together; each takes 8 bytes for every hash


class Excluded:
    """A writer for the dropped documents of datatrove's filters that only counts them.

    Attributes:
        tally: the dropped documents, by source.
    """

    def __init__(self, reason: str) -> None:
        self.tally = Tally()
        self._reason = reason

    def __enter__(self) -> Excluded:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: datatrove closes its writers here, and this one holds no file."""

    def write(self, document: Document, rank: int = 0) -> None:
        item = LeftOut(document.id, self._reason, _DETAILS[self._reason], damaged=False)
        self.tally.leave_out(document.metadata[SOURCE], item, on_error="skip")


class _Signature(MinhashDedupSignature):
    """MinHash of a long document in parts, since a document of 5 million characters would take 2 GB."""

    def get_signature(self, shingles: NDArray[np.uint64]) -> list[list[int]]:
        hashes = [
            np.array(super(_Signature, self).get_signature(shingles[i : i + _SHINGLES]), np.uint64)
            for i in range(0, len(shingles), _SHINGLES)
        ]
        smallest: list[list[int]] = np.min(hashes, axis=0).tolist()
        return smallest


def exact_signatures(work: Work) -> PipelineStep:
    """Return the step that writes the hash of each document of a task."""
    return ExactDedupSignature(_folder(work, "exact/signatures"), _exact_config(), finder_workers=num_finders(work))


def num_finders(work: Work) -> int:
    """Return the number of tasks of the stage that compares the hashes."""
    return max(1, min(_MOST_FINDERS, work.tasks // _TASKS_PER_FINDER))


def exact_finder(work: Work) -> PipelineStep:
    """Return the step that merges one range of the hashes of all tasks and lists the duplicates."""
    return ExactFindDedups(
        _few_files(work, "exact/signatures"),
        _few_files(work, "exact/duplicates"),
        _exact_config(),
        lines_to_buffer=records_at_once(work.tasks, _EXACT_BYTES),
    )


def near_signatures(work: Work, near: NearDuplicatesConfig) -> PipelineStep:
    """Return the step that writes the MinHash signature of each document of a task."""
    return _Signature(_folder(work, "near/signatures"), _near_config(near), language=PlainWords())


def near_finder(work: Work, near: NearDuplicatesConfig) -> PipelineStep:
    """Return the step that merges one bucket of all signatures and lists the pairs that agree; one task a bucket."""
    return MinhashDedupBuckets(
        _few_files(work, "near/signatures"),
        _folder(work, "near/pairs"),
        config=_near_config(near),
        lines_to_buffer=records_at_once(work.tasks, near.hashes_per_bucket * _HASH_BYTES + _NUMBER_BYTES),
    )


def near_clusters(work: Work, near: NearDuplicatesConfig) -> PipelineStep:
    """Return the step that joins pairs to clusters and lists all of each but one; its one task holds all pairs."""
    return MinhashDedupCluster(
        _folder(work, "near/pairs"), _few_files(work, "near/clusters"), _near_config(near), lines_to_buffer=_PAIRS
    )


def without_duplicates(work: Work, config: PrepareConfig, excluded: list[Excluded], near: bool = True) -> list[Any]:
    """Return the steps that skip duplicates.

    Args:
        work: of the finished stages above.
        config: the spec.
        excluded: receives the counters of the skipped documents.
        near: True to skip near duplicates too, if the spec has duplicates=near.
    """
    steps: list[Any] = []
    if config.duplicates != "keep":
        excluded.append(Excluded(DUPLICATE))
        steps.append(ExactDedupFilter(_folder(work, "exact/duplicates"), _exact_config(), excluded[-1]))
    if near and config.duplicates == "near":
        excluded.append(Excluded(NEAR_DUPLICATE))
        steps.append(MinhashDedupFilter(_folder(work, "near/clusters"), excluded[-1], lines_to_buffer=_PAIRS))
    return steps


def _folder(work: Work, name: str) -> str:
    path = work.folder / name
    path.mkdir(parents=True, exist_ok=True)
    return str(path)


def _few_files(work: Work, name: str) -> FewFiles:
    return FewFiles(_folder(work, name))


def _exact_config() -> ExactDedupConfig:
    return ExactDedupConfig(content_getter=_text, document_priority=_priority)


def _near_config(near: NearDuplicatesConfig) -> MinhashConfig:
    return MinhashConfig(near.ngram_words, near.buckets, near.hashes_per_bucket)


def _text(document: Document) -> str:
    return document.text


def _priority(document: Document) -> int:
    return _HIGHEST_PRIORITY - min(document.metadata[RANK], _HIGHEST_PRIORITY - 1)
