"""prepare_report.json: the spec, the results for every document, and the check whether a folder is already prepared.

A dataset is identified by its spec and by the names, sizes and times of its input files, so repeating a command is free
and a changed command is never mistaken for a repeated one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.clean.clean_documents import TRAIN, VALIDATION, SourceTally, Tally
from data_prep.clean.contamination import looked_for_line, set_named
from data_prep.make_tokenizer import tokenizer_file
from modernbert_train.config.tools.prepare import DatasetConfig
from modernbert_train.core.claim import Change, changes, refuse
from modernbert_train.core.files import os_errors_as, saying
from modernbert_train.core.read_json import read_json
from modernbert_train.core.text import table
from modernbert_train.core.version import __version__
from modernbert_train.data.dataset_card import LENGTHS, file_sha256, read_card
from modernbert_train.data.field_counts import FieldCounts
from modernbert_train.data.read.find_files import file_state, source_files
from modernbert_train.data.statistics import length_bins
from modernbert_train.errors import ConfigError, DataError

REPORT = "prepare_report.json"
Fingerprint = dict[str, Any]


def fingerprint(config: DatasetConfig) -> Fingerprint:
    """Return the keys that determine the dataset, and a digest of its files: name, size and time, or the content.

    A hub dataset that is not on this disk is identified by its name only.

    Raises:
        ConfigError: two sources read the same texts.
        DataError: a source lacks files, or the given tokenizer does not exist.
    """
    files: list[Path] = []
    homes: dict[tuple[str, str | None], str] = {}  # of a file's texts
    for name, source in config.sources.items():
        own = source_files(name, source)
        for file in own:
            other = homes.setdefault((os.path.abspath(file), source.text_column), name)
            if other != name:
                raise ConfigError(
                    f"sources.{other} and sources.{name}: both read {file}. Remove one of them, or set "
                    f"sources.{name}.glob to other files."
                )
        files += own
    for name, source in config.evaluation_sets.items():
        with set_named(name):
            files += source_files(name, source)
    digest, total = hashlib.sha256(), 0
    for file in files:
        size, time = file_state(file)
        total += max(size, 0)
        digest.update(f"{file}\0{size}\0{time}\0".encode("utf-8", "surrogateescape"))
    for key, path in config.files.items():
        file = tokenizer_file(path)
        with os_errors_as(DataError, f"{key}={file}: cannot be read", "Correct the path."):
            digest.update(file_sha256(file).encode())
    inputs = {"files": len(files), "bytes": total, "digest": digest.hexdigest()[:16]}
    return {"spec": config.identity(), "inputs": inputs}


def is_finished(out: Path, identity: Fingerprint, overwrite: bool, report: str = REPORT) -> bool:
    """Return True if `out` holds the wanted dataset already, by the report of this name.

    Raises:
        ConfigError: `out` holds another dataset and may not be overwritten, or is not a dataset.
        DataError: the dataset is the right one, but damaged.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not (out / report).is_file():
        raise ConfigError(
            f"out={out}: exists and is not a dataset of `prepare`, so it is not touched. Give another "
            "folder with out=..., or remove it yourself."
        )
    if overwrite:
        return False
    refuse(
        f"out={out}: holds a dataset of another spec or of other files",
        changed_since(out / report, identity),
        "Replace it with --overwrite, or give another folder with out=...",
    )
    for split in _splits(out):
        require_card(out / split)
    return True


def changed_since(report: Path, identity: Fingerprint) -> list[Change]:
    """Return how the fingerprint in a report differs from the wanted one.

    Raises:
        DataError: the report is damaged.
    """
    wrong, remedy = f"{report}: cannot be read", "--overwrite writes the dataset again."
    with os_errors_as(DataError, wrong, remedy, ValueError, KeyError, TypeError):
        return changes(read_json(report)["fingerprint"], identity)


def require_card(folder: Path) -> None:
    """Raise DataError if a folder of shards is incomplete or damaged."""
    with saying(after=" --overwrite writes the dataset again.", kind=DataError):
        read_card(folder)


def write_report(
    folder: Path,
    identity: Fingerprint,
    tally: Tally,
    tasks: int,
    not_read: dict[str, dict[str, int]],
    looked_for: Mapping[str, Mapping[str, int]],
) -> None:
    """Write prepare_report.json into the dataset's folder; assert that no document of any source vanished.

    Args:
        folder: of the splits.
        identity: the dataset's fingerprint.
        tally: results for every document.
        tasks: number of tasks.
        not_read: skipped files in folders of the sources, see sources.passed_over.
        looked_for: how the texts of each evaluation set were searched.
    """
    total = tally.total()
    cards = {split: read_card(folder / split) for split in _splits(folder)}
    for split, card in cards.items():
        assert (card.documents, card.tokens) == (total.documents[split], total.tokens[split]), split
    for name, each in tally.sources.items():
        assert each.read == each.documents.total() + each.dropped.total(), name
    report = {
        "created_by": f"modernbert-train {__version__}",
        **_counts(total),
        "first_dropped": dict(sorted(tally.offenders.items())),
        "sources": {name: _counts(each) for name, each in tally.sources.items()},
        "not_read": not_read,
        "looked_for": looked_for,
        "lengths": {split: length_bins(np.load(folder / split / LENGTHS, mmap_mode="r")) for split in cards},
        "tasks": tasks,
        "seconds": {stage: round(value, 1) for stage, value in tally.seconds.items()},
        "fingerprint": identity,
    }
    (folder / REPORT).write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def describe(out: Path) -> str:
    """Return a description of a finished dataset for the user."""
    report = json.loads((out / REPORT).read_text(encoding="utf-8"))
    lines = [
        f"{out / split}: {numbers['documents']:,} documents, {numbers['tokens']:,} tokens"
        for split, numbers in report["written"].items()
    ]
    lines += [f"{split}, {name} by tokens: {counts}" for split, name, counts in _fields(out)]
    lines += _streams(out, report)
    if report["altered"]:
        altered = ", ".join(f"{count:,} by {what}" for what, count in report["altered"].items())
        lines.append(f"altered: {altered}")
    if report["dropped"]:
        lines.append(f"the first dropped documents for each reason: {out / REPORT}")
    for name, how in report.get("looked_for", {}).items():  # reports of earlier versions lack it
        lines.append(f"decontaminate.{name}: {looked_for_line(how)}")
    return "\n".join([*lines, _source_table(report["sources"])])


def _source_table(sources: dict[str, Any]) -> str:
    """Return a table of the results for each source."""
    rows = [["source", "in", "kept", "left out", ""]]
    for name, each in sources.items():
        kept, dropped = sum(split["documents"] for split in each["written"].values()), each["dropped"]
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
        rows.append([name, f"{each['documents_read']:,}", f"{kept:,}", f"{sum(dropped.values()):,}", reasons])
    return table(rows, numbers=True)


def _fields(out: Path) -> Iterator[tuple[str, str, FieldCounts]]:
    for split in _splits(out):
        for name, counts in (read_card(out / split).fields or {}).items():
            yield split, name, counts


def _streams(out: Path, report: dict[str, Any]) -> list[str]:
    """Return the streams as YAML for a run's configuration, for the user to copy."""
    names = [split for split in report["written"] if split.startswith(f"{TRAIN}-")]
    if not names:
        return []
    return [
        "for the run's configuration, to be weighted (docs/mixtures.md):",
        "data:\n  streams:",
        *(f"    {name.removeprefix(f'{TRAIN}-')}: {{path: {out / name}, repeat: 1}}" for name in names),
    ]


def _counts(tally: SourceTally) -> dict[str, Any]:
    return {
        "documents_read": tally.read,
        "written": {
            split: {"documents": tally.documents[split], "tokens": tally.tokens[split]}
            for split in sorted(tally.documents)
            if tally.documents[split]
        },
        "dropped": dict(sorted(tally.dropped.items())),
        "altered": dict(sorted(tally.altered.items())),
        "text_bytes": tally.text_bytes.total(),
    }


def _splits(folder: Path) -> list[str]:
    is_split = [VALIDATION, TRAIN, f"{TRAIN}-*"]
    return sorted(path.name for pattern in is_split for path in folder.glob(pattern) if path.is_dir())
