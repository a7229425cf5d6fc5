"""The file beside the shards of a labelled split: a line for each of its texts, also for those that were left out.

It says where the text stands in its file, what it is told, and the number of its first document; of a question also
what its answers are cut out of.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modernbert_train.core.files import os_errors_as
from modernbert_train.core.read_json import parse_json
from modernbert_train.errors import DataError

_ENDS = ".texts.jsonl"  # behind the name of a split


def file_of_texts(shards: Path) -> Path:
    """Where it is."""
    return shards.with_name(f"{shards.name}{_ENDS}")


def read_texts(shards: Path) -> list[dict[str, Any]]:
    """Its lines.

    Raises:
        DataError: it cannot be read.
    """
    file = file_of_texts(shards)
    remedy = f"Remove {file.parent}, and the same command makes it again."
    with os_errors_as(DataError, f"{file}: cannot be read", remedy, ValueError):
        return [parse_json(line) for line in file.read_text(encoding="utf-8").splitlines()]
