"""Sidecar file of a labelled split's shards: one line for each text, including texts that were left out.

A line gives the text's position in its file, its label, and the number of its first document; for a question also the
context that answers are cut from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modernbert_train.core.files import os_errors_as
from modernbert_train.core.read_json import parse_json
from modernbert_train.errors import DataError

_ENDS = ".texts.jsonl"  # suffix to the name of a split


def file_of_texts(shards: Path) -> Path:
    """Return the path of a split's sidecar file."""
    return shards.with_name(f"{shards.name}{_ENDS}")


def read_texts(shards: Path) -> list[dict[str, Any]]:
    """Read the lines of a split's sidecar file.

    Raises:
        DataError: it cannot be read.
    """
    file = file_of_texts(shards)
    remedy = f"Remove {file.parent}, and the same command makes it again."
    with os_errors_as(DataError, f"{file}: cannot be read", remedy, ValueError):
        return [parse_json(line) for line in file.read_text(encoding="utf-8").splitlines()]
