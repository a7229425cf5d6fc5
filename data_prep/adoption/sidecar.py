"""Write the files that make shards trainable: an index with hashes, lengths, counts, the report, and finally the card.

The card is written last, so an unfinished folder never looks complete. The shards are never changed.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.adoption.adopt_report import REPORT, claimed_for, digest_of, is_finished, write_report
from data_prep.adoption.adopt_report import describe as describe_folder
from data_prep.adoption.findings import Findings, describe
from data_prep.adoption.layout import Layout, find_layout, the_only
from data_prep.adoption.survey import Survey, write_parts
from data_prep.adoption.tokenizer_fit import DOCUMENTS, EachShard, end_tokens, require_fit, spread, take_sample
from data_prep.report import Fingerprint
from data_prep.write.merging import join_lengths
from modernbert_train.core.files import sync
from modernbert_train.core.version import __version__
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
from modernbert_train.data.remote import is_remote
from modernbert_train.errors import ConfigError
from modernbert_train.vocabulary import read_vocabulary

WORK = ".adopt"  # in the card's folder, until the card is written
_WRITTEN = (ADOPTED_INDEX, LENGTHS, TOKEN_COUNTS, REPORT, CARD)


def _require_free(folder: Path, own: bool) -> None:
    """Refuse to overwrite files of other programs.

    Args:
        folder: of the card.
        own: True if it is the folder of the shards; otherwise it must be empty.

    Raises:
        ConfigError: names a file.
    """
    if (folder / CARD).exists() or (folder / WORK).exists() or not folder.exists():
        return
    present = [name for name in _WRITTEN if (folder / name).exists()] if own else sorted(os.listdir(folder))
    if present:
        raise ConfigError(
            f"{folder}: contains {present[0]}, which this program did not write and will not replace. Give an empty "
            "folder with --out."
        )


@dataclass(frozen=True)
class Request:
    """Arguments of `adopt` in data_prep/adopt.py."""

    source: str
    tokenizer: str
    out: str | None
    column: str | None
    dtype: str | None
    workers: int | None
    overwrite: bool
    anyway: bool


def adopt_shards(request: Request) -> str:
    """Adopt MDS shards; result and errors as of `adopt` in data_prep/adopt.py."""
    if request.out is None and is_remote(request.source):
        raise ConfigError(f"{request.source}: the card cannot be written there. Give a local folder with --out.")
    layout = find_layout(request.source, request.column, request.dtype)
    folder = Path(request.source if request.out is None else request.out)
    vocabulary, names = read_vocabulary(request.tokenizer), end_tokens(request.tokenizer)
    identity: Fingerprint = {
        "shards": layout.root,
        "column": layout.column,
        "dtype": request.dtype,
        "tokenizer": vocabulary.sha256,
        "index": digest_of(layout.entries),
    }
    work = folder / WORK
    if is_finished(folder, identity, request.overwrite):
        if work.exists():  # killed after the last file
            with claimed_for(identity, work):
                pass
        return f"already adopted; --overwrite repeats it\n{describe_folder(folder)}"
    _require_free(folder, own=request.out is None or folder.resolve() == Path(layout.root))
    with claimed_for(identity, work):
        fit = EachShard(request.tokenizer, names, request.anyway)
        survey = Survey(work, layout.root, layout.column, request.dtype, vocabulary.num_entries, fit)
        chosen = [layout.entries[i] for i in spread(len(layout.entries), DOCUMENTS)]
        firsts = [(survey.name(each), ids) for each in chosen if (ids := survey.first(each)) is not None]
        sample = take_sample(firsts, request.tokenizer, names)
        require_fit(sample, request.source, request.tokenizer, request.anyway)
        num_parts = write_parts(work, layout.entries)
        findings = survey.run(num_parts, layout.num_bytes, request.workers)
        facts = {"tokenizer": request.tokenizer, **sample.to_json(), "findings": findings.to_json()}
        _write_files(survey, num_parts, findings, layout, folder, vocabulary.sha256, identity, facts)
    return describe_folder(folder)


def _write_files(
    survey: Survey,
    num_parts: int,
    findings: Findings,
    layout: Layout,
    folder: Path,
    tokenizer_sha256: str,
    identity: Fingerprint,
    facts: dict[str, Any],
) -> None:
    """Merge the results of the parts. Raises DataError if folders differ in the type of their ids."""
    work, started = survey.work, time.monotonic()
    with (work / ADOPTED_INDEX).open("w", encoding="utf-8") as index:
        index.write('{"version": 2, "shards": [')
        for rank in range(num_parts):
            entries = survey.left(rank)["entries"]
            index.write(", " * (rank > 0) + ", ".join(json.dumps(entry, sort_keys=True) for entry in entries))
        index.write("]}")
    folders: dict[str, str] = {}
    for subfolder, dtype in findings.dtypes.items():
        folders.setdefault(dtype, subfolder or ".")
    dtype = the_only(layout.root, "the type of the ids", folders)
    join_lengths((survey.array(rank, "lengths") for rank in range(num_parts)), work / LENGTHS, findings.documents)
    counts = np.zeros(survey.vocab_size, np.int64)
    for rank in range(num_parts):
        counts += survey.array(rank, "counts")
    np.save(work / TOKEN_COUNTS, counts)
    card = DatasetCard(
        column=survey.column,
        dtype=dtype,
        documents=findings.documents,
        tokens=findings.tokens,
        vocab_size=survey.vocab_size,
        tokenizer_sha256=tokenizer_sha256,
        index_sha256=file_sha256(work / ADOPTED_INDEX),
        lengths_sha256=file_sha256(work / LENGTHS),
        lengths_xxh3=file_xxh3(work / LENGTHS),
        special_tokens="loader",
        created_by=f"modernbert-train {__version__}",
        index=ADOPTED_INDEX,
        shards=None if Path(layout.root) == folder.resolve() else layout.root,
        stripped=sorted(findings.removed),
    )
    indexes = "one index" if layout.indexes == 1 else f"{layout.indexes:,} indexes"
    lines = list(describe(findings, counts, survey.fit.special))
    lines.append(
        f"{len(layout.entries):,} shards of {layout.num_bytes:,} bytes by {indexes}, column "
        f"{layout.column} ({layout.encoding}, {dtype}); "
        f"hashes: {findings.verified:,} right, {findings.hashed:,} computed"
    )
    report = facts | {
        "tokenizer_sha256": tokenizer_sha256,
        "shards": layout.root,
        "found": lines,
        "notes": layout.notes,
        "seconds": {"joining": round(time.monotonic() - started, 1)},
    }
    write_report(work / REPORT, identity, report)
    write_card(work, card)
    (folder / CARD).unlink(missing_ok=True)
    for name in _WRITTEN:
        sync(work / name)
        os.replace(work / name, folder / name)
    sync(folder)
