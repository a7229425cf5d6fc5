"""Read and write result.json, the result of a run on labelled texts, from which tables are made."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from modernbert_train.core.files import os_errors_as, write_whole
from modernbert_train.core.read_json import read_json
from modernbert_train.core.version import __version__
from modernbert_train.data.dataset_card import file_sha256
from modernbert_train.errors import StorageError
from modernbert_train.evaluate.finetune.task import UNTRAINED, named_model
from modernbert_train.weights.names import weights_hash

RESULT, PREDICTIONS, ADAPTER = "result.json", "predictions.jsonl", "adapter"
DATA_FILES = "data_files"  # entry of a result: the files that the run has read, see `hashed`


def read_result(file: Path) -> dict[str, Any] | None:
    """Read the result of a run; None if it has none, or if the file has another form."""
    result: Any = None
    with suppress(OSError, ValueError):
        result = read_json(file)
    kinds: dict[str, type | tuple[type, ...]] = {"task": str, "source": str, "seed": (int, type(None))}
    kinds |= {"figures": dict, "settings": dict}
    is_valid = isinstance(result, dict) and all(isinstance(result.get(key), kind) for key, kind in kinds.items())
    return result if is_valid else None


def hashed(files: Mapping[str, Path]) -> dict[str, dict[str, str]]:
    """Return the path and the SHA-256 of each file that a run reads, in the form of its record."""
    return {name: {"file": str(path), "sha256": file_sha256(path)} for name, path in files.items()}


def write_figures(
    file: Path,
    *,
    task: str,
    source: str,
    seed: int | None,
    run: str,
    figures: Mapping[str, Mapping[str, float]],
    counts: Mapping[str, Mapping[str, int]],
    settings: Mapping[str, Any],
    begun: str | None = None,
    **more: Any,
) -> None:
    """Write a result.

    Args:
        file: result.json.
        task, source, seed, run: the task, the model, the seed and the name of the run.
        figures: by split; NaN and infinities are written as null.
        counts: texts of each split by outcome.
        settings: of the task.
        begun: hash of the model as the run began with it; None: as it is now.
        more: further entries, for this kind of task only.

    Raises:
        StorageError: the disk refuses it.
    """
    named = named_model(source)
    content = {
        "task": task,
        "source": source,
        "source_weights": None if UNTRAINED in named.baseline else begun or weights_hash(named.source),
        "seed": seed,
        "run": run,
        "figures": {
            name: {figure: value if math.isfinite(value) else None for figure, value in each.items()}
            for name, each in figures.items()
        },
        "counts": counts,
        "settings": settings,
        **more,
        "created_by": f"modernbert-train {__version__}",
    }
    with os_errors_as(StorageError, f"{file}: cannot be written", "Free the disk; the same command resumes."):
        write_whole(file, json.dumps(content, indent=2) + "\n")
