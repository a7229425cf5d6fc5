"""adopt_report.json, and whether a folder holds what is asked for, so that the same command again costs nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from modernbert_train.data.dataset_card import CARD, read_card
from modernbert_train.errors import ConfigError, DataError, StorageError
from modernbert_train.files import lock_now
from modernbert_train.read_json import read_json
from modernbert_train.version import __version__

REPORT = "adopt_report.json"
_LOCK, _ASKED = ".lock", "asked.json"

Fingerprint = dict[str, str | None]


def digest(parts: Sequence[object]) -> str:
    """A short hash of what can be JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def digest_of(entries: Sequence[object]) -> str:
    """`digest` of a list with the JSON of these, one after the other: together they may be a hundred megabytes."""
    found = hashlib.sha256(b'["[')
    for number, entry in enumerate(entries):
        text = ", " * (number > 0) + json.dumps(entry, sort_keys=True)
        found.update(json.dumps(text)[1:-1].encode())  # as text within JSON
    found.update(b']"]')
    return found.hexdigest()[:16]


def is_finished(folder: Path, asked: Fingerprint, overwrite: bool) -> bool:
    """Whether a folder is adopted as it is asked for.

    Raises:
        ConfigError: it is a dataset of data_prep/prepare.py, or was adopted otherwise.
        DataError: it is adopted, and damaged since.
    """
    if not (folder / CARD).exists():
        return False
    if not (folder / REPORT).exists():
        raise ConfigError(
            f"{folder}: has a {CARD} of `prepare`, so it can be trained on as it is: data.train={folder}. "
            "To write elsewhere give another folder with --out."
        )
    if overwrite:
        return False
    try:
        there = read_json(folder / REPORT)["fingerprint"]
        changed = [f"{key}: {there.get(key)} there, {asked[key]} now" for key in asked if there.get(key) != asked[key]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{folder / REPORT}: cannot be read ({error}). --overwrite adopts the shards anew.") from None
    if changed:
        raise ConfigError(
            f"{folder}: was adopted otherwise, or the shards have changed ({'; '.join(changed)}). --overwrite adopts "
            "them anew; runs on what is there now cannot resume then."
        )
    try:
        read_card(folder)
    except DataError as error:
        raise DataError(f"{error} --overwrite adopts the shards anew.") from None
    return True


@contextmanager
def claimed(work: Path, asked: Fingerprint) -> Iterator[None]:
    """Keep others from a folder of unfinished work while the block runs; what is in it of other shards is removed.

    Raises:
        StorageError: another process has it.
        ConfigError: it cannot be made.
    """
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock = (work / _LOCK).open("a")
    except OSError as error:
        raise ConfigError(
            f"{work}: cannot be written ({error.strerror}). Give a folder of your own with --out; the shards stay "
            "where they are."
        ) from None
    with lock:
        if not lock_now(lock):
            raise StorageError(f"{work}: another process is at work on it at this moment. Wait for it.")
        try:
            there = read_json(work / _ASKED)
        except (OSError, ValueError):
            there = None
        if there != asked:
            for path in work.iterdir():
                if path.is_file() and path.name != _LOCK:
                    path.unlink()
            (work / _ASKED).write_text(json.dumps(asked), encoding="utf-8")
        yield


def write_report(path: Path, asked: Fingerprint, facts: dict[str, Any]) -> None:
    content = {"created_by": f"modernbert-train {__version__}", **facts, "fingerprint": asked}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def describe(folder: Path) -> str:
    """An adopted folder in some lines for a person."""
    report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    lines = [f"{folder}: {report['found'][0]}"]
    lines += [f"  {line}" for line in report["found"][1:]]
    lines += [f"  note: {note}" for note in report["notes"]]
    lines += [f"  {report['agree']:.1%} of {report['sampled_tokens']:,} tokens looked at come back when encoded again"]
    lines += ["as text:", *(f"  {text}" for text in report["sample"])]
    lines += [f"train on it with data.train={folder} data.tokenizer={report['tokenizer']}"]
    return "\n".join(lines)
