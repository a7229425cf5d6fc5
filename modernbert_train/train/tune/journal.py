"""Journal of a tune, a line for each measurement: a tune that was killed finds them and measures the rest."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from modernbert_train.core.files import append_line, os_errors_as
from modernbert_train.core.read_json import read_lines
from modernbert_train.errors import StorageError

JOURNAL = "journal.jsonl"


class Journal:
    """The measurements of one case.

    Args:
        folder: of the case.
        about: what they are of; those of something else are put aside, under another name.

    Attributes:
        remembered: how many were there.
    """

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.path = folder / JOURNAL
        entries = read_lines(self.path)[0] if self.path.is_file() else []
        if entries and entries[0].get("about") != about:
            self.put_aside(folder)
            entries = []
        self._known = {_key(each["key"]): each["value"] for each in entries if "key" in each and "value" in each}
        self.remembered = len(self._known)
        if not entries:
            self._append({"about": about})

    @staticmethod
    def put_aside(folder: Path) -> None:
        """Give the journal of a folder another name, if there is one."""
        path = folder / JOURNAL
        if path.is_file():
            path.rename(path.with_name(f"{path.name}.until-{time.strftime('%Y%m%d-%H%M%S')}"))

    def once(self, key: list[Any], measure: Callable[[], Any]) -> Any:
        """What was measured under a key, or is measured now; of what it raises nothing is remembered.

        Raises:
            StorageError: the disk refuses it.
        """
        name = _key(key)
        if name not in self._known:
            value = measure()
            self._append({"key": key, "value": value})
            self._known[name] = value
        return self._known[name]

    def _append(self, entry: dict[str, Any]) -> None:
        with os_errors_as(
            StorageError, f"{self.path}: cannot be written", "Free some space; the same command resumes."
        ):
            append_line(self.path, json.dumps(entry))


def _key(key: list[Any]) -> str:
    return json.dumps(key, sort_keys=True)
