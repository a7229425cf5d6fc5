"""Write the files beside shards of others: an index with hashes, lengths, counts, the report, and at last the card.

Nothing looks complete before the card is there, and the shards themselves are never touched.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.adoption.findings import Findings, describe
from data_prep.adoption.layout import Layout
from data_prep.adoption.result import REPORT, Fingerprint, write_report
from data_prep.adoption.survey import Survey
from data_prep.adoption.tokenizer_fit import Sample
from modernbert_train.data.dataset_card import (
    ADOPTED_INDEX,
    CARD,
    LENGTHS,
    TOKEN_COUNTS,
    DatasetCard,
    file_sha256,
    file_xxh3,
    write_card,
)
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.files import sync
from modernbert_train.version import __version__

WORK = ".adopt"  # in the folder of the card, until that is there
_WRITTEN = (ADOPTED_INDEX, LENGTHS, TOKEN_COUNTS, REPORT, CARD)


def require_free(folder: Path, own: bool) -> None:
    """Refuse to write over files of somebody else.

    Args:
        folder: of the card.
        own: it is the folder of the shards; else nothing else may be in it.

    Raises:
        ConfigError: names a file.
    """
    if (folder / CARD).exists() or (folder / WORK).exists() or not folder.exists():
        return
    there = [name for name in _WRITTEN if (folder / name).exists()] if own else sorted(os.listdir(folder))
    if there:
        raise ConfigError(
            f"{folder}: has {there[0]}, which is not of this program and is not touched. Give an empty folder with "
            "--out."
        )


def write_beside(
    survey: Survey,
    parts: int,
    layout: Layout,
    folder: Path,
    names: dict[int, str],
    asked: Fingerprint,
    sample: Sample,
    facts: dict[str, Any],
) -> None:
    """Join what the parts left.

    Args:
        survey: all parts of which are done.
        parts: how many.
        layout: of the shards.
        folder: of the card.
        names: of the special tokens.
        asked: what identifies the outcome.
        sample: of the documents.
        facts: for the report: `tokenizer`, its folder, and `tokenizer_sha256`.

    Raises:
        DataError: there are no tokens, or folders differ in the type of their ids.
    """
    work, found, counts = survey.work, Findings(), np.zeros(survey.vocab_size, np.int64)
    started = time.monotonic()
    with (work / ADOPTED_INDEX).open("w", encoding="utf-8") as index:
        index.write('{"version": 2, "shards": [')
        for rank in range(parts):
            findings, entries, _, part_counts = survey.result(rank)
            found.add(findings)
            counts += part_counts
            index.write(", " * (rank > 0) + ", ".join(json.dumps(entry, sort_keys=True) for entry in entries))
        index.write("]}")
    dtype = _one_dtype(layout.root, found)
    if not found.tokens:
        raise DataError(f"{layout.root}: the shards hold no tokens.")
    lengths = np.lib.format.open_memmap(work / LENGTHS, mode="w+", dtype=np.uint32, shape=(found.documents,))
    at = 0
    for rank in range(parts):
        _, _, part, _ = survey.result(rank)
        lengths[at : at + len(part)] = part
        at += len(part)
    assert at == found.documents
    lengths.flush()
    np.save(work / TOKEN_COUNTS, counts)
    card = DatasetCard(
        column=survey.column,
        dtype=dtype,
        documents=found.documents,
        tokens=found.tokens,
        vocab_size=survey.vocab_size,
        tokenizer_sha256=facts["tokenizer_sha256"],
        index_sha256=file_sha256(work / ADOPTED_INDEX),
        lengths_sha256=file_sha256(work / LENGTHS),
        lengths_xxh3=file_xxh3(work / LENGTHS),
        special_tokens="loader",
        created_by=f"modernbert-train {__version__}",
        index=ADOPTED_INDEX,
        shards=None if Path(layout.root) == folder.resolve() else layout.root,
        stripped=sorted(found.removed),
    )
    indexes = "one index" if layout.indexes == 1 else f"{layout.indexes:,} indexes"
    lines = list(describe(found, counts, names))
    lines.append(
        f"{len(layout.entries):,} shards of {layout.num_bytes:,} bytes by {indexes}, column "
        f"{layout.column} ({layout.encoding}, {dtype}); hashes: {found.verified:,} right, {found.hashed:,} computed"
    )
    report = facts | {
        "shards": layout.root,
        "found": lines,
        "notes": layout.notes,
        **sample.to_json(),
        "findings": found.to_json(),
        "seconds": {"joining": round(time.monotonic() - started, 1)},
    }
    write_report(work / REPORT, asked, report)
    write_card(work, card)
    (folder / CARD).unlink(missing_ok=True)
    for name in _WRITTEN:
        sync(work / name)
        os.replace(work / name, folder / name)
    sync(folder)


def _one_dtype(root: str, found: Findings) -> str:
    """The type of all ids; folders must agree."""
    first: tuple[str, str] | None = None
    for folder, dtype in found.dtypes.items():
        first = first or (folder, dtype)
        if dtype != first[1]:
            raise DataError(
                f"{root}: ids in {first[0] or '.'} are {first[1]}, in {folder or '.'} {dtype}; so they were not "
                "written by one program. Adopt the folders one by one, and name them as data.streams."
            )
    return first[1] if first else "int64"
