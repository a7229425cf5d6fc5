"""adopt_report.json, and the check whether a folder is already adopted, so that repeating a command costs nothing."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_prep.report import Fingerprint, changed_since, require_card
from data_prep.write.workspace import LOCK, claimed
from modernbert_train.core.claim import refuse
from modernbert_train.core.version import __version__
from modernbert_train.data.dataset_card import CARD
from modernbert_train.errors import ConfigError

REPORT = "adopt_report.json"


def digest_of(entries: Sequence[object]) -> str:
    """Return a short hash of values that can be JSON."""
    text = json.dumps([json.dumps(entries, sort_keys=True)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_finished(folder: Path, identity: Fingerprint, overwrite: bool) -> bool:
    """Return True if a folder is adopted with these arguments.

    Raises:
        ConfigError: it is a dataset of `prepare`, or was adopted with other arguments.
        DataError: it is adopted, and was damaged since.
    """
    if not (folder / CARD).exists():
        return False
    if not (folder / REPORT).exists():
        raise ConfigError(
            f"{folder}: has a {CARD} of `prepare`, so it can be trained on as it is: data.train={folder}. "
            "To write to another folder, use --out."
        )
    if overwrite:
        return False
    refuse(
        f"{folder}: was adopted with other arguments, or the shards have changed",
        changed_since(folder / REPORT, identity),
        "--overwrite adopts them again; runs on the present dataset cannot resume after that.",
    )
    require_card(folder)
    return True


@contextmanager
def claimed_for(identity: Fingerprint, work: Path) -> Iterator[None]:
    """Lock a work folder as `claimed` does; clear it if other arguments made it, and remove it after the block.

    Raises:
        StorageError: see `claimed`.
    """
    with claimed(work, "--out"):
        mark = work / f"asked-{digest_of([identity])}"
        if not mark.exists():
            for path in work.iterdir():
                if path.is_file() and not path.name.startswith(LOCK):
                    path.unlink()
            mark.touch()
        yield
        shutil.rmtree(work, ignore_errors=True)


def write_report(path: Path, identity: Fingerprint, facts: dict[str, Any]) -> None:
    content = {"created_by": f"modernbert-train {__version__}", **facts, "fingerprint": identity}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def describe(folder: Path) -> str:
    """Return a description of an adopted folder for the user."""
    report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    lines = [f"{folder}: {report['found'][0]}"]
    lines += [f"  {line}" for line in report["found"][1:]]
    lines += [f"  note: {note}" for note in report["notes"]]
    lines += [f"  {report['agree']:.1%} of {report['sampled_tokens']:,} sampled tokens are equal when encoded again"]
    lines += ["as text:", *(f"  {text}" for text in report["sample"])]
    lines += [f"train on it with data.train={folder} data.tokenizer={report['tokenizer']}"]
    return "\n".join(lines)
