"""Read samples.jsonl of a run: the model's predictions at each validation, written by evaluate/samples.py."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from modernbert_train.core.read_json import is_count, parse_object

SAMPLES = "samples.jsonl"
MAX_VALIDATIONS = 200  # maximum number read: the last ones
_BYTES = 1 << 26  # maximum number read from the file


def read_samples(run_folder: Path) -> list[dict[str, Any]]:
    """Return the samples of each validation in order; lines that are damaged or void after a resume are left out."""
    samples: list[dict[str, Any]] = []
    lines: list[bytes] = []
    with suppress(OSError), (run_folder / SAMPLES).open("rb") as file:
        lines = file.read(_BYTES).split(b"\n")
    for entry in filter(None, map(parse_object, lines)):
        if not is_count(entry.get("step")) or not isinstance(entry.get("texts"), list):
            continue
        key = (entry["step"], entry.get("phase"))
        samples = [each for each in samples if each["step"] <= key[0] and (each["step"], each.get("phase")) != key]
        samples.append(entry)
    return samples[-MAX_VALIDATIONS:]
