"""Stages in their order: each is a datatrove pipeline and its number of tasks.

    survey      read, clean, filter, split; write the decisions and the hash of each text
    find        compare the hashes of all tasks to find duplicates
    signatures, pairs, clusters     the same for near duplicates
    tokenizer   train one on the training documents, or adapt the given one
    tokenise    read again, skip duplicates, write tokens
    merge       link the shards of all tasks into one dataset

The first and the last but one read everything; the stages between read signatures, and the tokenizer's text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from datatrove.data import DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from data_prep.clean import duplicates
from data_prep.clean.clean_documents import VALIDATION, require_documents, training_draw
from data_prep.clean.damage import require_little_lost
from data_prep.make_tokenizer import adapt_tokenizer, require_size, roles_of_adapted, save_tokenizer, train_tokenizer
from data_prep.read.reader_steps import SPLIT, Replay, Step, Survey, read_tallies
from data_prep.report import Fingerprint
from data_prep.tasks.executors import Stage, is_alone
from data_prep.tasks.stage_progress import Counted, Progress
from data_prep.tasks.task_workers import Documents
from data_prep.tasks.work import Work
from data_prep.write.merging import Merge
from data_prep.write.workspace import require_space
from data_prep.write.writer_steps import WriteShards
from modernbert_train.config.tools.prepare import PrepareConfig
from modernbert_train.core.files import sync

_DISK_BYTES_PER_TEXT_BYTE = 0.5  # upper estimate: the quickstart takes 0.21, 0.53 before compression
_DISK_BYTES = 1 << 24  # for other files than shards: tokenizer, lengths, counts


def make_stages(work: Work, config: PrepareConfig, identity: Fingerprint) -> list[Stage]:
    """Return the stages of a spec.

    Args:
        work: folder through which stages pass their results.
        config: the spec.
        identity: the dataset's fingerprint.
    """
    folder, tasks, near = work.folder, work.tasks, config.near_duplicates
    stages = []

    def add(name: str, number: int, steps: list[Any], *written: str) -> None:
        stages.append(Stage(name, number, (*steps, Settle(folder, written)), counted.get(name)))

    def seen_of_all(stage: str) -> Documents:
        every = None if stage == "survey" else Progress(work, "survey").count()
        return Documents(Progress(work, stage).count, every)

    counted = {name: partial(seen_of_all, name) for name in ("survey", "signatures", "tokenizer", "tokenise")}
    if config.tokenizer.path is not None:
        del counted["tokenizer"]
    sign = [] if config.duplicates == "keep" else [duplicates.exact_signatures(work)]
    survey = ("survey/{rank:05d}.*", "exact/signatures/*/{rank:05d}.*")
    add("survey", tasks, [Survey(work, config, "survey"), Counted(Progress(work, "survey")), *sign], *survey)
    if config.duplicates != "keep":
        finders = duplicates.num_finders(work)
        add("find", finders, [duplicates.exact_finder(work)], "exact/duplicates/{rank:05d}/*")
    if config.duplicates == "near":
        replayed = [Replay(work, config, "signatures"), Counted(Progress(work, "signatures"))]
        steps = [*replayed, *duplicates.without_duplicates(work, config, [], near=False)]
        steps.append(duplicates.near_signatures(work, near))
        add("signatures", tasks, steps, "near/signatures/*/{rank:05d}.*")
        add("pairs", near.buckets, [duplicates.near_finder(work, near)], "near/pairs/{rank:05d}_*")
        add("clusters", 1, [duplicates.near_clusters(work, near)], "near/clusters/*")
    add("tokenizer", 1, [MakeTokenizer(work, config, "tokenizer")], "tokenizer/*")
    excluded: list[duplicates.Excluded] = []
    steps = [
        Replay(work, config, "tokenise"),
        Counted(Progress(work, "tokenise")),
        *duplicates.without_duplicates(work, config, excluded),
    ]
    steps.append(WriteShards(work, config, "tokenise", excluded, threads=is_alone(work, config.executor)))
    add("tokenise", tasks, steps, "tokenise/{rank:05d}.json", "tokenise/{rank:05d}/*/*")
    add("merge", 1, [Merge(work, config, "merge", identity)])
    return stages


class MakeTokenizer(Step[PrepareConfig]):
    """Step that trains the tokenizer on the training documents of all tasks, or adapts the given one."""

    type = "tokenizer"
    name = "tokenizer"

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """Write the tokenizer's folder.

        Raises:
            DataError: the survey has left too few documents, too few of a source, or too little text for
                tokenizer.vocab_size.
            StorageError: the disk is too small for the output.
        """
        settings = self._config.tokenizer
        survey = read_tallies(self._work, "survey")
        require_little_lost(self._config, survey)
        require_documents(self._config, survey)
        text_bytes = survey.total().text_bytes.total()
        require_space(Path(self._config.out), int(text_bytes * _DISK_BYTES_PER_TEXT_BYTE) + _DISK_BYTES)
        if settings.path is None:
            tokenizer = train_tokenizer(self._training_texts(), settings.vocab_size, settings.spare_entries)
            require_size(tokenizer, settings.vocab_size)
            save_tokenizer(tokenizer, self._work.tokenizer)
        else:
            tokenizer = adapt_tokenizer(settings.path, settings.extend, settings.spare_entries)
            save_tokenizer(tokenizer, self._work.tokenizer, roles_of_adapted(settings.path))

    def _training_texts(self) -> Iterator[str]:
        share, progress = self._config.tokenizer.training_share, Progress(self._work, self._stage)
        for rank in range(self._work.tasks):
            steps = [Replay(self._work, self._config, self._stage), Counted(progress)]
            documents: Any = None
            for step in [*steps, *duplicates.without_duplicates(self._work, self._config, [])]:
                documents = step(documents, rank, self._work.tasks)
            for document in documents:
                if document.metadata[SPLIT] != VALIDATION and (share == 1 or training_draw(document.text) < share):
                    yield document.text


class Settle(PipelineStep):
    """Step that finishes a task, and syncs its files to disk, before it is marked as completed."""

    type = "writer"
    name = "settle"

    def __init__(self, folder: Path, written: tuple[str, ...]) -> None:
        super().__init__()
        self._folder = folder
        self._written = written

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """Wait for the files whose names contain the number of the task."""
        deque(data or (), maxlen=0)
        for pattern in self._written:
            for path in self._folder.glob(pattern.format(rank=rank)):
                if path.stat().st_size:  # a small task leaves 60 empty files of signatures, which may be lost
                    sync(path)
