"""Datasets of the Hugging Face hub, and folders that `save_to_disk` wrote, through the library `datasets`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modernbert_train.data.tables import some
from modernbert_train.errors import DataError


def is_saved(path: str) -> bool:
    """Return True if `save_to_disk` of a Dataset or DatasetDict wrote a folder."""
    return any((Path(path) / name).is_file() for name in ("state.json", "dataset_dict.json"))


def open_dataset(path: str, subset: str | None, split: str, *, streaming: bool) -> Any:
    """Open one split of a dataset.

    Raises:
        DataError: the folder lacks the split.
        Exception: `datasets` cannot open it; of any type.
    """
    import datasets

    if not is_saved(path):
        return datasets.load_dataset(path, subset, split=split, **{"streaming": True} if streaming else {})
    found = datasets.load_from_disk(path)
    is_one = isinstance(found, datasets.Dataset)
    splits = {"train": found} if is_one else {**found}
    if subset is not None or split not in splits:
        remedy = "neither subset nor split. Leave both out." if is_one else f"the splits {some([*splits])}. Name one."
        raise DataError(f"{path}: save_to_disk wrote it, with {remedy}")
    return splits[split].to_iterable_dataset() if streaming else splits[split]
