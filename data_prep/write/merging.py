"""Merge the shards of all tasks into one dataset: linked into its folder under new numbers, with one index and card.

Only the small files of a part are read, and shards are not moved, so an interrupted merge can simply be repeated. The
dataset appears once it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.data import DocumentsPipeline
from numpy.typing import NDArray

from data_prep.clean.clean_documents import Tally, require_documents, splits_of
from data_prep.clean.contamination import evaluations_of
from data_prep.clean.damage import require_little_lost
from data_prep.read.reader_steps import Step, read_tallies
from data_prep.report import Fingerprint, write_report
from data_prep.tasks.work import Work
from data_prep.write.workspace import workspace
from modernbert_train.config.tools.prepare import PrepareConfig
from modernbert_train.data.dataset_card import (
    INDEX,
    LENGTHS,
    TOKEN_COUNTS,
    DatasetCard,
    file_sha256,
    file_xxh3,
    read_card,
    write_card,
)
from modernbert_train.data.field_counts import FieldCounts
from modernbert_train.data.read.find_files import passed_over
from modernbert_train.errors import StorageError


class Merge(Step[PrepareConfig]):
    """Step that puts the finished dataset into its place.

    Args:
        work, config, stage: see `Step`; with all tasks done.
        identity: the dataset's fingerprint, see report.fingerprint.
    """

    type = "writer"
    name = "merge"

    def __init__(self, work: Work, config: PrepareConfig, stage: str, identity: Fingerprint) -> None:
        super().__init__(work, config, stage)
        self._identity = identity

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """Write the dataset.

        Raises:
            DataError: duplicates and filters have left a split empty, or too much of a source is lost.
            StorageError: a disk operation fails, or a shard differs from its index.
        """
        survey, tokenise = (read_tallies(self._work, stage) for stage in ("survey", "tokenise"))
        tally = _joined(survey, tokenise)
        require_little_lost(self._config, tally)
        require_documents(self._config, tally)
        with workspace(Path(self._config.out)) as folder:
            shutil.copytree(self._work.tokenizer, folder / "tokenizer")
            for split in splits_of(self._config):
                folders = [self._work.shards(rank) / split for rank in range(self._work.tasks)]
                fields = {name: counts.listed() for name, counts in tally.fields.get(split, {}).items()}
                merge_split(folders, folder / split, fields or None, tally.total().text_bytes[split])
            evaluations = evaluations_of(self._config)
            looked_for = {} if evaluations is None else evaluations.looked_for
            write_report(folder, self._identity, tally, self._work.tasks, passed_over(self._config), looked_for)


def merge_split(
    folders: list[Path], folder: Path, fields: dict[str, FieldCounts] | None = None, text_bytes: int | None = None
) -> None:
    """Join folders of shards, in order; folders that do not exist are skipped, and without any nothing is written.

    Args:
        folders: as modernbert_train.data.shard_writer.ShardWriter writes them, all with one tokenizer.
        folder: to be created.
        fields, text_bytes: of all the documents, for the card.

    Raises:
        StorageError: a shard has another size than its index says.
    """
    folders = [part for part in folders if part.is_dir()]
    if not folders:
        return
    folder.mkdir()
    cards = [read_card(part) for part in folders]
    documents, tokens = sum(card.documents for card in cards), sum(card.tokens for card in cards)
    index = {"version": 2, "shards": list(_link_shards(folders, folder))}
    (folder / INDEX).write_text(json.dumps(index, sort_keys=True), encoding="utf-8")
    join_lengths((np.load(part / LENGTHS) for part in folders), folder / LENGTHS, documents)
    np.save(folder / TOKEN_COUNTS, sum(np.load(part / TOKEN_COUNTS) for part in folders))
    card: DatasetCard = replace(
        cards[0],
        documents=documents,
        tokens=tokens,
        index_sha256=file_sha256(folder / INDEX),
        lengths_sha256=file_sha256(folder / LENGTHS),
        lengths_xxh3=file_xxh3(folder / LENGTHS),
        fields=fields,
        text_bytes=text_bytes,
    )
    write_card(folder, card)


def _link_shards(folders: list[Path], folder: Path) -> Iterator[dict[str, Any]]:
    """Link each shard under its new number; yield its entry of the index."""
    number = 0
    for part in folders:
        for shard in json.loads((part / INDEX).read_text(encoding="utf-8"))["shards"]:
            stored = shard["zip_data"] or shard["raw_data"]
            old = part / stored["basename"]
            for data in (shard["raw_data"], shard["zip_data"]):
                if data is not None:
                    _, _, *kind = data["basename"].split(".")  # shard.00000.mds.zstd
                    data["basename"] = ".".join(["shard", f"{number:05d}", *kind])
            if old.stat().st_size != stored["bytes"]:
                raise StorageError(
                    f"{old}: {old.stat().st_size} bytes, its index says {stored['bytes']}; the machine must have "
                    f"crashed. Remove {part.parents[2]} and start again."
                )
            _link(old, folder / stored["basename"])
            number += 1
            yield shard


def _link(old: Path, new: Path) -> None:
    try:
        os.link(old, new)
    except OSError:  # a file system without hard links
        if new.exists():  # a copy would replace it
            raise
        shutil.copyfile(old, new)


def join_lengths(arrays: Iterable[NDArray[np.uint32]], path: Path, documents: int) -> None:
    """Write the lengths of all parts, one after the other, for this number of documents."""
    lengths = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint32, shape=(documents,))
    at = 0
    for part in arrays:
        lengths[at : at + len(part)] = part
        at += len(part)
    assert at == documents
    lengths.flush()


def _joined(survey: Tally, tokenise: Tally) -> Tally:
    """Combine reads and drops of the survey with writes and drops of the last stage."""
    tally = Tally()
    tally.add(survey)
    tally.fields = {}
    for name, each in tally.sources.items():
        tally.sources[name] = replace(each, documents=Counter(), text_bytes=Counter(), tokens=Counter())
    tally.add(tokenise)
    return tally
