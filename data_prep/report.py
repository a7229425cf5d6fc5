"""prepare_report.json: what was asked, what became of every document, and whether a folder is the one being asked for.

A dataset is identified by its spec and by the names, sizes and times of its input files, so that repeating a command
is free and changing one is never mistaken for repeating it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from data_prep.documents import TRAIN, VALIDATION, Tally
from data_prep.sources import source_files
from data_prep.tokenizer import tokenizer_file
from modernbert_train import __version__
from modernbert_train.config.prepare import PrepareConfig
from modernbert_train.data.dataset_card import file_sha256, read_card
from modernbert_train.errors import ConfigError, DataError

REPORT = "prepare_report.json"
Fingerprint = dict[str, Any]


def fingerprint(config: PrepareConfig) -> Fingerprint:
    """The spec without `out`, and a digest of the files it reads (of a hub dataset only its name is known).

    Raises:
        DataError: a source has no files, or the given tokenizer does not exist.
    """
    spec = dataclasses.asdict(config)
    del spec["out"]
    files = [file for name, source in config.sources.items() for file in source_files(name, source)]
    digest, total = hashlib.sha256(), 0
    for file in files:
        size, time = -1, 0
        if file.exists():  # else a dangling link, which reading will report
            size, time = file.stat().st_size, file.stat().st_mtime_ns
        total += max(size, 0)
        digest.update(f"{file}\0{size}\0{time}\0".encode("utf-8", "surrogateescape"))
    if config.tokenizer.path is not None:
        try:
            digest.update(file_sha256(tokenizer_file(config.tokenizer.path)).encode())
        except OSError as error:
            raise DataError(
                f"tokenizer.path={config.tokenizer.path}: {error.strerror}. Give a tokenizer.json or its folder, or "
                "set tokenizer.path=null to train one."
            ) from None
    return {"spec": spec, "inputs": {"files": len(files), "bytes": total, "digest": digest.hexdigest()[:16]}}


def is_finished(out: Path, asked: Fingerprint, overwrite: bool) -> bool:
    """Whether `out` holds the dataset that is asked for, so that nothing is left to do.

    Raises:
        ConfigError: `out` holds another dataset and may not be overwritten, or something that is no dataset.
        DataError: the dataset is the right one, but damaged.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not (out / REPORT).is_file():
        raise ConfigError(
            f"out={out}: exists and is not a dataset of data_prep/prepare.py, so it is not touched. Give another "
            "folder with out=..., or remove it yourself."
        )
    if overwrite:
        return False
    try:
        recorded = json.loads((out / REPORT).read_text(encoding="utf-8"))["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{out / REPORT}: cannot be read ({error}). --overwrite makes the dataset again.") from None
    there, here = _flat(recorded), _flat(asked)
    changes = [
        f"{key}: {there.get(key)} there, {here.get(key)} now"
        for key in {**there, **here}
        if there.get(key) != here.get(key)
    ]
    if changes:
        raise ConfigError(
            f"out={out}: holds a dataset of another spec or of other files ({'; '.join(changes)}). Replace it with "
            "--overwrite, or give another folder with out=..."
        )
    for split in _splits(out):
        try:
            read_card(out / split)
        except DataError as error:
            raise DataError(f"{error} --overwrite makes the dataset again.") from None
    return True


def write_report(folder: Path, asked: Fingerprint, tally: Tally, seconds: dict[str, float]) -> None:
    """Write prepare_report.json beside the splits; asserts that no document vanished."""
    written = {split: dataclasses.asdict(read_card(folder / split)) for split in _splits(folder)}
    assert all(written[split]["documents"] == tally.kept[split] for split in written)
    assert tally.read == sum(card["documents"] for card in written.values()) + sum(tally.dropped.values())
    report = {
        "created_by": f"modernbert-train {__version__}",
        "documents_read": tally.read,
        "written": {split: {key: card[key] for key in ("documents", "tokens")} for split, card in written.items()},
        "dropped": dict(sorted(tally.dropped.items())),
        "first_dropped": dict(sorted(tally.offenders.items())),
        "text_bytes": tally.bytes,
        "seconds": {part: round(value, 1) for part, value in seconds.items()},
        "fingerprint": asked,
    }
    (folder / REPORT).write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def describe(out: Path) -> str:
    """A finished dataset in a few lines for a person."""
    report = json.loads((out / REPORT).read_text(encoding="utf-8"))
    lines = [
        f"{out / split}: {numbers['documents']:,} documents, {numbers['tokens']:,} tokens"
        for split, numbers in report["written"].items()
    ]
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in report["dropped"].items()) or "none"
    lines.append(f"left out of {report['documents_read']:,} documents read: {dropped} (listed in {out / REPORT})")
    return "\n".join(lines)


def _splits(folder: Path) -> list[str]:
    return [split for split in (TRAIN, VALIDATION) if (folder / split).is_dir()]


def _flat(tree: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {path: tree}
    return {
        key: value for name, inner in tree.items() for key, value in _flat(inner, f"{path}.{name}".strip(".")).items()
    }
