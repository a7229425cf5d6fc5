"""samples.jsonl of a run: what its model filled in at each validation, as evaluate/samples.py writes it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from modernbert_train.core.read_json import is_count, parse_object

SAMPLES = "samples.jsonl"
MOST = 200  # validations that are shown: the last ones
_BYTES = 1 << 26  # read of the end of the file


def read_samples(run_folder: Path) -> list[dict[str, Any]]:
    """The samples of each validation in its order; lines that are damaged, or that a resume made void, are left out."""
    found: list[dict[str, Any]] = []
    lines: list[bytes] = []
    with suppress(OSError), (run_folder / SAMPLES).open("rb") as file:
        lines = file.read(_BYTES).split(b"\n")
    for entry in filter(None, map(parse_object, lines)):
        if not is_count(entry.get("step")) or not isinstance(entry.get("texts"), list):
            continue
        key = (entry["step"], entry.get("phase"))
        found = [each for each in found if each["step"] <= key[0] and (each["step"], each.get("phase")) != key]
        found.append(entry)
    return found[-MOST:]
