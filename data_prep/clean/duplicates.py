"""Exact and near duplicates, by datatrove's blocks.

Both work on disk: a task writes one signature for each document, a second stage merges the sorted signatures of all
tasks and notes which documents to leave out, and whoever reads the documents again passes over those. Of equal texts
the first is kept, in the order of the sources. Of near duplicates one is kept, the same in every run.
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

from data_prep.clean.documents import Tally
from data_prep.clean.few_files import FewFiles, records_at_once
from data_prep.clean.words import PlainWords
from data_prep.read.items import LeftOut
from data_prep.read.steps import RANK, SOURCE
from data_prep.tasks.work import Work
from modernbert_train.config.tools.prepare import NearDuplicatesConfig, PrepareConfig

exact_dedup.tqdm = minhash.tqdm = partial(tqdm, disable=True)  # else a bar for every task

DUPLICATE, NEAR_DUPLICATE = "duplicate", "near_duplicate"
_DETAILS = {
    DUPLICATE: "same text as an earlier document",
    NEAR_DUPLICATE: "much the same text as another document",
}
_TASKS_PER_FINDER = 16  # signatures of so many tasks are compared by one process, and at most ...
_MOST_FINDERS = 64
_EXACT_BYTES, _HASH_BYTES, _NUMBER_BYTES = 14, 8, 4  # of a signature in a file: hash, priority and number; its parts
_PAIRS = 1024  # read from a file at once
_HIGHEST_PRIORITY = 65535
_SHINGLES = 1 << 13  # hashed at once; each takes 8 bytes for every hash


class Excluded:
    """Stands where datatrove's filters take a writer for what they leave out, and only counts it.

    Attributes:
        tally: what was left out, by source.
    """

    def __init__(self, reason: str) -> None:
        self.tally = Tally()
        self._reason = reason

    def __enter__(self) -> Excluded:
        return self

    def __exit__(self, *_: object) -> None:
        """datatrove closes its writers here; there is nothing to close."""

    def write(self, document: Document, rank: int = 0) -> None:
        item = LeftOut(document.id, self._reason, _DETAILS[self._reason], damaged=False)
        self.tally.leave_out(document.metadata[SOURCE], item, on_error="skip")


class _Signature(MinhashDedupSignature):
    """MinHash of a long document in parts, since all at once takes 2 GB for a document of 5 million characters."""

    def get_signature(self, shingles: NDArray[np.uint64]) -> list[list[int]]:
        parts = [
            np.array(super(_Signature, self).get_signature(shingles[i : i + _SHINGLES]), np.uint64)
            for i in range(0, len(shingles), _SHINGLES)
        ]
        smallest: list[list[int]] = np.min(parts, axis=0).tolist()
        return smallest


def exact_signatures(work: Work) -> PipelineStep:
    """Takes a task's documents and writes the hash of each."""
    return ExactDedupSignature(_folder(work, "exact/signatures"), _exact_config(), finder_workers=num_finders(work))


def num_finders(work: Work) -> int:
    """Tasks of the stage that compares the hashes."""
    return max(1, min(_MOST_FINDERS, work.tasks // _TASKS_PER_FINDER))


def exact_finder(work: Work) -> PipelineStep:
    """Merges one range of the hashes of all tasks and writes down which documents are duplicates."""
    return ExactFindDedups(
        _few_files(work, "exact/signatures"),
        _few_files(work, "exact/duplicates"),
        _exact_config(),
        lines_to_buffer=records_at_once(work.tasks, _EXACT_BYTES),
    )


def near_signatures(work: Work, near: NearDuplicatesConfig) -> PipelineStep:
    """Takes a task's documents and writes the MinHash signature of each."""
    return _Signature(_folder(work, "near/signatures"), _near_config(near), language=PlainWords())


def near_finder(work: Work, near: NearDuplicatesConfig) -> PipelineStep:
    """Merges one bucket of the signatures of all tasks and writes down the pairs that agree; a task for each bucket."""
    return MinhashDedupBuckets(
        _few_files(work, "near/signatures"),
        _folder(work, "near/pairs"),
        config=_near_config(near),
        lines_to_buffer=records_at_once(work.tasks, near.hashes_per_bucket * _HASH_BYTES + _NUMBER_BYTES),
    )


def near_clusters(work: Work, near: NearDuplicatesConfig) -> PipelineStep:
    """Joins pairs to clusters and writes down all documents of each but one; one task, which holds all pairs."""
    return MinhashDedupCluster(
        _folder(work, "near/pairs"), _few_files(work, "near/clusters"), _near_config(near), lines_to_buffer=_PAIRS
    )


def without_duplicates(work: Work, config: PrepareConfig, excluded: list[Excluded], near: bool = True) -> list[Any]:
    """The steps that pass over duplicates.

    Args:
        work: of the finished stages above.
        config: the spec.
        excluded: gets what counts the documents that are passed over.
        near: whether to pass over near duplicates too, if the spec asks for it.
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
