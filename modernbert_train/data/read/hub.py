"""Datasets of the Hugging Face hub, and folders that `save_to_disk` wrote, through the library `datasets`.

A dataset can be cut between its shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from modernbert_train.config.tools.prepare import RowSourceConfig
from modernbert_train.core.files import anything_as
from modernbert_train.core.text import some
from modernbert_train.data.read.rows import Row, Span
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
    loaded = datasets.load_from_disk(path)
    is_one = isinstance(loaded, datasets.Dataset)
    splits = {"train": loaded} if is_one else {**loaded}
    if subset is not None or split not in splits:
        remedy = "neither subset nor split. Leave both out." if is_one else f"the splits {some([*splits])}. Name one."
        raise DataError(f"{path}: save_to_disk wrote it, with {remedy}")
    return splits[split].to_iterable_dataset() if streaming else splits[split]


def class_names(dataset: Any, column: str) -> tuple[str, ...]:
    """Return the names of the classes in a column, of its lists' items too; empty without names."""
    kind = dataset.features[column]
    return tuple(getattr(getattr(kind, "feature", kind), "names", None) or ())


def hub_shards(name: str, source: RowSourceConfig) -> int:
    """Return the number of parts into which `datasets` cuts a dataset.

    Raises:
        DataError: it cannot be opened.
    """
    with _errors_of(name, source):
        return int(_hub_rows(source).num_shards)


def read_hub(span: Span, source: RowSourceConfig) -> Iterator[Row]:
    """Yield the rows of one part of a hub dataset.

    Raises:
        DataError: a row cannot be read, regardless of `on_error`: a network failure must not look like the end of the
            data.
    """
    shard, shards = span.begin, span.end or 1
    where = f"{source.path}/{source.split or 'train'}" + (f" part {shard + 1} of {shards}" if shards > 1 else "")
    with _errors_of(span.source, source):
        rows = _hub_rows(source)
        if shards > 1:
            rows = rows.shard(num_shards=shards, index=shard)
        for number, row in enumerate(rows, start=1):
            yield Row(f"{where}:{number}", row, line=number)


def _hub_rows(source: RowSourceConfig) -> Any:
    return open_dataset(str(source.path), source.subset, source.split or "train", streaming=True)


def _errors_of(name: str, source: RowSourceConfig) -> AbstractContextManager[None]:
    message = f"sources.{name}.path={source.path}: split {source.split or 'train'} cannot be read to its end"
    return anything_as(DataError, message, "Correct path, subset and split, or try again.")
